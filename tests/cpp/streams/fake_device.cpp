// A device with streams, for tests of what is queued on which stream: torch's PrivateUse1. Kernels are those of the CPU
// and run at once; a vector clock for each stream tells which of them are ordered on a device whose streams run beside
// each other. Two uses of memory that no event orders, one of them a write, are a race. So is a new tensor of a stream
// that another one may still use former memory of: as torch's allocator for CUDA has it, memory goes back to the stream
// that it was made for.
#include <ATen/EmptyTensor.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <ATen/native/CPUFallback.h>
#include <ATen/ops/_reshape_alias_native.h>
#include <ATen/ops/as_strided_native.h>
#include <ATen/ops/from_blob.h>
#include <ATen/ops/view_native.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>
#include <torch/csrc/utils/pybind.h>
#include <torch/library.h>

#include <algorithm>
#include <array>
#include <cstdlib>
#include <map>
#include <mutex>
#include <set>
#include <string>
#include <tuple>
#include <vector>

namespace {

using c10::Device;
using c10::DeviceIndex;
using c10::Stream;

constexpr c10::DeviceType kType = c10::DeviceType::PrivateUse1;
constexpr size_t kMostStreams = 8;

using Clock = std::array<uint64_t, kMostStreams>;

struct Memory {
  size_t stream;                   // that it goes back to
  std::map<size_t, uint64_t> uses; // when each stream used it last
  std::map<size_t, uint64_t> writes;
  std::set<size_t> recorded; // by record_stream
};

struct Fake {
  std::mutex mutex;
  std::array<Clock, kMostStreams> clocks{};
  size_t num_streams = 1;
  std::map<void*, Memory> memory;
  std::vector<Memory> given_back;                      // since the last new tensor of its stream
  std::vector<std::tuple<std::string, size_t>> events; // kernels and waits, and on which stream
  std::vector<std::string> races;
};

Fake& fake() {
  static auto* const found = new Fake; // tensors may outlive it else
  return *found;
}

thread_local size_t current = 0;
thread_local bool in_kernel = false;

struct Allocator final : c10::Allocator {
  c10::DataPtr allocate(size_t num_bytes) override {
    void* const data = std::malloc(std::max<size_t>(num_bytes, 1));
    const std::lock_guard<std::mutex> lock(fake().mutex);
    fake().memory[data] = Memory{current, {}, {}, {}};
    std::erase_if(fake().given_back, [](const Memory& former) {
      if (former.stream != current) {
        return false;
      }
      for (const auto& [stream, time] : former.uses) {
        if (fake().clocks[current][stream] < time && former.recorded.count(stream) == 0) {
          fake().races.push_back(
              "a new tensor of stream " + std::to_string(current) + " has memory that stream " +
              std::to_string(stream) + " still uses");
        }
      }
      return true;
    });
    return {data, data, &give_back, Device(kType, 0)};
  }
  static void give_back(void* data) {
    const std::lock_guard<std::mutex> lock(fake().mutex);
    const auto found = fake().memory.find(data);
    fake().given_back.push_back(found->second);
    fake().memory.erase(found);
    std::free(data);
  }
  c10::DeleterFnPtr raw_deleter() const override {
    return &give_back;
  }
  void copy_data(void* to, const void* from, size_t num_bytes) const override {
    default_copy_data(to, from, num_bytes);
  }
};

Allocator allocator;

struct Guard final : c10::impl::DeviceGuardImplInterface {
  static constexpr c10::DeviceType static_type = kType;
  static Stream of(size_t stream) {
    return Stream(Stream::UNSAFE, Device(kType, 0), static_cast<c10::StreamId>(stream));
  }
  c10::DeviceType type() const override {
    return kType;
  }
  Device exchangeDevice(Device) const override {
    return {kType, 0};
  }
  Device getDevice() const override {
    return {kType, 0};
  }
  void setDevice(Device) const override {
  }
  void uncheckedSetDevice(Device) const noexcept override {
  }
  DeviceIndex deviceCount() const noexcept override {
    return 1;
  }
  Stream getStream(Device) const override {
    return of(current);
  }
  Stream getDefaultStream(Device) const override {
    return of(0);
  }
  Stream getNewStream(Device, int) const override {
    const std::lock_guard<std::mutex> lock(fake().mutex);
    TORCH_CHECK(fake().num_streams < kMostStreams, "too many streams");
    return of(fake().num_streams++);
  }
  Stream getStreamFromGlobalPool(Device device, bool) const override {
    return getNewStream(device, 0);
  }
  Stream exchangeStream(Stream stream) const override {
    return of(std::exchange(current, static_cast<size_t>(stream.id())));
  }
  void record(void** event, const Stream& stream, DeviceIndex, c10::EventFlag) const override {
    const std::lock_guard<std::mutex> lock(fake().mutex);
    delete static_cast<Clock*>(*event);
    *event = new Clock(fake().clocks[stream.id()]);
  }
  void block(void* event, const Stream& stream) const override {
    const std::lock_guard<std::mutex> lock(fake().mutex);
    Clock& clock = fake().clocks[stream.id()];
    const Clock& other = *static_cast<Clock*>(event);
    for (size_t i = 0; i < kMostStreams; ++i) {
      if (other[i] > clock[i]) {
        fake().events.emplace_back("waits for " + std::to_string(i), stream.id());
        clock[i] = other[i];
      }
    }
  }
  bool queryEvent(void*) const override {
    return true;
  }
  void destroyEvent(void* event, DeviceIndex) const noexcept override {
    delete static_cast<Clock*>(event);
  }
  void recordDataPtrOnStream(const c10::DataPtr& data, const Stream& stream) const override {
    const std::lock_guard<std::mutex> lock(fake().mutex);
    fake().memory[data.get()].recorded.insert(stream.id());
  }
};

C10_REGISTER_GUARD_IMPL(PrivateUse1, Guard);

struct Hooks final : at::PrivateUse1HooksInterface {
  bool isBuilt() const override {
    return true;
  }
  bool isAvailable() const override {
    return true;
  }
  bool hasPrimaryContext(DeviceIndex) const override {
    return true;
  }
  DeviceIndex deviceCount() const override {
    return 1;
  }
  DeviceIndex getCurrentDevice() const override {
    return 0;
  }
};

// A use of a tensor by the current stream's kernel.
void use(const at::Tensor& tensor, bool writes, const std::string& kernel) {
  if (!tensor.defined() || tensor.device().type() != kType || !tensor.has_storage()) {
    return;
  }
  auto& all = fake();
  const auto found = all.memory.find(tensor.storage().mutable_data());
  if (found == all.memory.end()) {
    return;
  }
  Memory& memory = found->second;
  for (const auto& [stream, time] : writes ? memory.uses : memory.writes) {
    if (all.clocks[current][stream] < time) {
      all.races.push_back(
          kernel + " on stream " + std::to_string(current) + (writes ? " writes" : " reads") + " what stream " +
          std::to_string(stream) + " uses");
    }
  }
  const uint64_t now = all.clocks[current][current];
  memory.uses[current] = now;
  if (writes) {
    memory.writes[current] = now;
  }
}

void use_all(const c10::IValue& value, bool writes, const std::string& kernel) {
  if (value.isTensor()) {
    use(value.toTensor(), writes, kernel);
  } else if (value.isTensorList()) {
    for (const at::Tensor& each : value.toTensorList()) {
      use(each, writes, kernel);
    }
  }
}

void begin(const std::string& kernel) {
  ++fake().clocks[current][current];
  fake().events.emplace_back(kernel, current);
}

// Any kernel that is not below: that of the CPU.
void run(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  const auto& schema = op.schema();
  const std::string& name = schema.name();
  if (!in_kernel) {
    const std::lock_guard<std::mutex> lock(fake().mutex);
    begin(name);
    const auto arguments = torch::jit::last(*stack, schema.arguments().size());
    for (size_t i = 0; i < arguments.size(); ++i) {
      const auto* alias = schema.arguments()[i].alias_info();
      use_all(arguments[i], alias != nullptr && alias->isWrite(), name);
    }
  }
  const bool outer = std::exchange(in_kernel, true);
  at::native::cpu_fallback(op, stack);
  in_kernel = outer;
  if (!in_kernel) {
    const std::lock_guard<std::mutex> lock(fake().mutex);
    for (const c10::IValue& result : torch::jit::last(*stack, schema.returns().size())) {
      use_all(result, /*writes=*/true, name);
    }
  }
}

using Format = std::optional<at::MemoryFormat>;
using Flag = std::optional<bool>;

at::Tensor empty(
    c10::IntArrayRef size, std::optional<at::ScalarType> dtype, std::optional<at::Layout>, std::optional<Device>, Flag,
    Format format) {
  return at::detail::empty_generic(
      size, &allocator, c10::DispatchKeySet(c10::DispatchKey::PrivateUse1), c10::dtype_or_default(dtype), format);
}

at::Tensor empty_strided(
    c10::IntArrayRef size, c10::IntArrayRef stride, std::optional<at::ScalarType> dtype, std::optional<at::Layout>,
    std::optional<Device>, Flag) {
  return at::detail::empty_strided_generic(
      size, stride, &allocator, c10::DispatchKeySet(c10::DispatchKey::PrivateUse1), c10::dtype_or_default(dtype));
}

// The same memory as a tensor of the CPU.
at::Tensor on_cpu(const at::Tensor& tensor) {
  if (tensor.device().is_cpu()) {
    return tensor;
  }
  return at::from_blob(
      tensor.data_ptr(), tensor.sizes(), tensor.strides(), tensor.options().device(at::kCPU).requires_grad(false));
}

at::Tensor copy_from(const at::Tensor& from, const at::Tensor& to, bool) {
  if (!in_kernel) {
    const std::lock_guard<std::mutex> lock(fake().mutex);
    begin("copy");
    use(from, false, "copy");
    use(to, true, "copy");
  }
  on_cpu(to).copy_(on_cpu(from));
  return to;
}

at::Tensor copy_from_and_resize(const at::Tensor& from, const at::Tensor& to) {
  TORCH_CHECK(from.sizes() == to.sizes(), "a result of another size");
  return copy_from(from, to, false);
}

TORCH_LIBRARY_IMPL(_, PrivateUse1, m) {
  m.fallback(torch::CppFunction::makeFromBoxedFunction<&run>());
}

TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  m.impl("empty.memory_format", &empty);
  m.impl("empty_strided", &empty_strided);
  m.impl("_copy_from", &copy_from);
  m.impl("_copy_from_and_resize", &copy_from_and_resize);
  m.impl("as_strided", at::native::as_strided_tensorimpl);
  m.impl("view", at::native::view);
  m.impl("_reshape_alias", at::native::_reshape_alias);
}

} // namespace

PYBIND11_MODULE(_C_streams, module) {
  at::RegisterPrivateUse1HooksInterface(new Hooks);
  c10::SetAllocator(kType, &allocator);
  // Kernels and waits for other streams since the last call, each with its stream, and races.
  module.def("seen", [] {
    const std::lock_guard<std::mutex> lock(fake().mutex);
    return std::make_tuple(std::exchange(fake().events, {}), std::exchange(fake().races, {}));
  });
}
