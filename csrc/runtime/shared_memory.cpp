// SharedMemory: exchanges between the ranks of one host, through memory that all of them map.
//
// Every rank owns a file without a name, which the other ranks open through /proc. A call copies the rank's rows into
// its own file and posts their number. `wait` of the returned Work copies the rows of the other ranks. Therefore no
// thread works beside the caller, a call waits for no rank, and the sent tensor is free again when the call returns.
//
// moe_ext/comm/shared_memory.py finds the ranks of a host and chooses this way or Gloo. It exists on Linux only.
#ifdef __linux__
#include <ATen/Parallel.h>
#include <ATen/record_function.h>
#include <torch/csrc/utils/pybind.h>
#include <torch/csrc/distributed/c10d/Work.hpp>

#include <fcntl.h>
#include <linux/futex.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <cerrno>
#include <chrono>
#include <cstring>
#include <deque>
#include <map>
#include <memory>
#include <mutex>
#include <numeric>
#include <random>
#include <string>
#include <string_view>
#include <thread>
#include <utility>
#include <vector>

#include "runtime/runtime.h"

namespace moe_ext::runtime {
namespace {

using Clock = std::chrono::steady_clock;
using Milliseconds = std::chrono::milliseconds;

// Largest distance of numbers between the oldest exchange of a rank that others have not read and the newest.
constexpr size_t kSlots = 4096;
// Bytes of its file that a rank keeps between exchanges; memory behind them goes back to the system.
constexpr size_t kKeptBytes = size_t{1} << 26;
// Bytes of address space for the files of all ranks together, of the 2^47 that a process has.
constexpr size_t kMostAddresses = size_t{1} << 45;
constexpr size_t kPage = 4096;
constexpr size_t kLine = 64;
// Interval at which a wait checks that the awaited rank still lives.
constexpr Milliseconds kLookEvery{50};
constexpr int kNumSpins = 1000;
constexpr std::string_view kName = "moe_ext";

size_t round_up(size_t value, size_t unit) {
  return (value + unit - 1) / unit * unit;
}

void copy(char* to, const char* from, size_t count) {
  at::parallel_for(0, static_cast<int64_t>(count), int64_t{1} << 20, [&](int64_t begin, int64_t end) {
    std::memcpy(to + begin, from + begin, static_cast<size_t>(end - begin));
  });
}

void pause() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

// The rows of an exchange for one rank: number of the exchange, place in the file, and size.
struct Part {
  uint64_t number, begin, bytes;
};

struct Header {
  uint64_t token;
  // 1 + the number of the last posted exchange, modulo 2^32. Waiting ranks sleep on this futex.
  alignas(kLine) std::atomic<uint32_t> posted;
  std::atomic<uint32_t> sleepers;
  std::atomic<uint32_t> closed;
  // Number of ranks that have read their part of an exchange, by slot.
  alignas(kLine) std::array<std::atomic<uint32_t>, kSlots> read;
};
static_assert(std::atomic<uint32_t>::is_always_lock_free && sizeof(std::atomic<uint32_t>) == sizeof(uint32_t));

long futex(std::atomic<uint32_t>& word, int operation, uint32_t value, const timespec* timeout) {
  return syscall(SYS_futex, &word, operation, value, timeout, nullptr, 0);
}

// The mapped file of one rank: header, parts of each slot, and rows. The system allocates a page when it is first
// written.
class Region {
 public:
  explicit Region(size_t num_ranks) : num_ranks_(num_ranks) {
    const auto memory = static_cast<size_t>(sysconf(_SC_PHYS_PAGES)) * static_cast<size_t>(sysconf(_SC_PAGE_SIZE));
    data_bytes_ = round_up(std::min(memory, kMostAddresses / num_ranks), kPage);
    data_begin_ = round_up(kPartsBegin + kSlots * num_ranks * sizeof(Part), kPage);
  }
  Region(const Region&) = delete;
  Region& operator=(const Region&) = delete;
  ~Region() {
    if (base_ != nullptr) {
      munmap(base_, num_bytes());
    }
    close();
  }

  // Creates this rank's file; false if the system does not allow it.
  bool make(uint64_t token) {
    rlimit most{};
    if (getrlimit(RLIMIT_FSIZE, &most) != 0 || most.rlim_cur < num_bytes()) {
      return false; // a file beyond the limit raises the signal SIGXFSZ
    }
    fd_ = memfd_create(std::string(kName).c_str(), MFD_CLOEXEC);
    if (fd_ < 0 || ftruncate(fd_, static_cast<off_t>(num_bytes())) != 0 || !map()) {
      return false;
    }
    header().token = token;
    // The system drops this lock when the process ends in any way, and a child does not inherit it. See `is_owned`.
    struct flock whole = lock();
    return fcntl(fd_, F_SETLK, &whole) == 0;
  }

  // Maps the file of another process; false if this fails, or if the descriptor now belongs to another file.
  bool open(int64_t process, int64_t fd, uint64_t token) {
    path_ = c10::str("/proc/", process, "/fd/", fd);
    std::array<char, 64> target{};
    const auto length = readlink(path_.c_str(), target.data(), target.size());
    const std::string expected = c10::str("/memfd:", kName);
    if (length < 0 || !std::string_view(target.data(), static_cast<size_t>(length)).starts_with(expected)) {
      return false;
    }
    fd_ = ::open(path_.c_str(), O_RDWR | O_CLOEXEC);
    struct stat found{};
    const bool is_mapped =
        fd_ >= 0 && fstat(fd_, &found) == 0 && static_cast<size_t>(found.st_size) == num_bytes() && map();
    inode_ = found.st_ino;
    // The mapping needs no descriptor, of which a process has few.
    close();
    return is_mapped && header().token == token && is_owned();
  }

  // Returns true while the process that made the file lives, which its lock tells.
  bool is_owned() const {
    const int fd = ::open(path_.c_str(), O_RDWR | O_CLOEXEC);
    if (fd < 0) {
      return errno == EMFILE || errno == ENFILE;
    }
    struct stat file{};
    struct flock found = lock();
    const bool is_it = fstat(fd, &file) == 0 && file.st_ino == inode_;
    const bool is_locked = fcntl(fd, F_GETLK, &found) != 0 || found.l_type != F_UNLCK;
    ::close(fd);
    return is_it && is_locked;
  }

  Header& header() const {
    return *reinterpret_cast<Header*>(base_);
  }
  Part& part(uint64_t number, size_t rank) const {
    auto* parts = reinterpret_cast<Part*>(base_ + kPartsBegin);
    return parts[(number % kSlots) * num_ranks_ + rank];
  }
  std::atomic<uint32_t>& read(uint64_t number) const {
    return header().read[number % kSlots];
  }
  bool has_posted(uint64_t number) const {
    return precedes(number, header().posted.load(std::memory_order_acquire));
  }
  static bool precedes(uint64_t number, uint32_t posted) {
    return static_cast<int32_t>(posted - static_cast<uint32_t>(number + 1)) >= 0;
  }
  char* data(uint64_t begin) const {
    return base_ + data_begin_ + begin;
  }
  size_t data_bytes() const {
    return data_bytes_;
  }
  void give_back(size_t begin, size_t end) const {
    const auto from = static_cast<off_t>(data_begin_ + begin);
    fallocate(fd_, FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, from, static_cast<off_t>(end - begin));
  }
  int fd() const {
    return fd_;
  }

 private:
  static constexpr size_t kPartsBegin = (sizeof(Header) + kLine - 1) / kLine * kLine;

  void close() {
    if (fd_ >= 0) {
      ::close(fd_);
      fd_ = -1;
    }
  }
  size_t num_bytes() const {
    return data_begin_ + data_bytes_;
  }
  bool map() {
    void* found = mmap(nullptr, num_bytes(), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_NORESERVE, fd_, 0);
    if (found == MAP_FAILED) {
      return false;
    }
    base_ = static_cast<char*>(found);
    madvise(base_, num_bytes(), MADV_DONTDUMP);
    return true;
  }
  static struct flock lock() {
    struct flock whole{};
    whole.l_type = F_WRLCK;
    whole.l_whence = SEEK_SET;
    return whole;
  }

  size_t num_ranks_;
  size_t data_begin_, data_bytes_;
  int fd_ = -1; // of this process's own file only
  std::string path_;
  ino_t inode_ = 0;
  char* base_ = nullptr;
};

// The files of all ranks, and the exchanges that this rank has posted and others have not read.
class Exchanges {
 public:
  Exchanges(size_t rank, size_t size, double seconds)
      : rank_(rank), timeout_(static_cast<int64_t>(1e3 * seconds)), process_(getpid()) {
    for (size_t each = 0; each < size; ++each) {
      regions_.push_back(std::make_unique<Region>(size));
    }
    std::random_device random;
    token_ = (uint64_t{random()} << 31) ^ random();
    is_made_ = own().make(token_);
    // With fewer cores than ranks a wait does not spin, because the awaited rank may need the core.
    num_spins_ = std::thread::hardware_concurrency() < size ? 0 : kNumSpins;
  }
  Exchanges(const Exchanges&) = delete;
  Exchanges& operator=(const Exchanges&) = delete;
  ~Exchanges() {
    close();
  }

  // Marks this rank as gone: ranks that wait for it raise an error, and `post` refuses further exchanges.
  void close() {
    // A forked child destroys its copy of this object, which must not close its parent's file.
    if (is_made_ && getpid() == process_) {
      own().header().closed.store(1);
      futex(own().header().posted, FUTEX_WAKE, INT32_MAX, nullptr);
    }
  }

  size_t rank() const {
    return rank_;
  }
  size_t size() const {
    return regions_.size();
  }
  Milliseconds timeout() const {
    return timeout_;
  }
  std::pair<int64_t, uint64_t> place() const {
    return {is_made_ ? own().fd() : -1, token_};
  }
  bool open(size_t rank, int64_t process, int64_t fd, uint64_t token) {
    return rank == rank_ || regions_[rank]->open(process, fd, token);
  }
  const Region& region(size_t rank) const {
    return *regions_[rank];
  }

  // Writes `bytes[rank]` bytes for each rank and posts the exchange. Numbers must rise, and may skip some. With
  // `is_same` all of `x` goes to every rank, and is written once.
  void post(uint64_t number, const char* x, const std::vector<size_t>& bytes, bool is_same) {
    const std::lock_guard guard(mutex_);
    TORCH_CHECK_WITH(
        DistNetworkError, own().header().closed.load() == 0, "shared memory: an earlier exchange has failed");
    forget_read();
    TORCH_CHECK(
        underway_.empty() || number < underway_.front().number + kSlots, "shared memory: expected one of the last ",
        kSlots, " exchanges to have been read, got none");
    TORCH_CHECK(
        !Region::precedes(number, own().header().posted.load()), "shared memory: expected numbers that rise, got ",
        number);
    const auto is_sent = [&](size_t rank) { return rank != rank_ && bytes[rank] > 0; };
    size_t total = 0;
    uint32_t readers = 0;
    for (size_t rank = 0; rank < bytes.size(); ++rank) {
      if (is_sent(rank)) {
        total = (is_same ? 0 : total) + round_up(bytes[rank], kLine);
        ++readers;
      }
    }
    const size_t place = find_place(total);
    size_t to = place, from = 0;
    for (size_t rank = 0, written = 0; rank < bytes.size(); ++rank) {
      if (is_sent(rank)) {
        if (!is_same || written++ == 0) {
          copy(own().data(to), x + from, bytes[rank]);
        }
        own().part(number, rank) = {number, to, bytes[rank]};
        to += is_same ? 0 : round_up(bytes[rank], kLine);
      }
      from += is_same ? 0 : bytes[rank];
    }
    own().read(number).store(0, std::memory_order_relaxed);
    underway_.push_back({number, place, readers});
    if (total > 0) {
      taken_[place] = place + total;
    }
    // This store comes before the load of `sleepers`, as a waiting rank adds itself to `sleepers` before it loads
    // `posted`. Otherwise each could miss the other, and no one would wake the rank.
    Header& header = own().header();
    header.posted.store(static_cast<uint32_t>(number + 1), std::memory_order_seq_cst);
    if (header.sleepers.load(std::memory_order_seq_cst) > 0) {
      futex(header.posted, FUTEX_WAKE, INT32_MAX, nullptr);
    }
  }

  // Returns true if a rank will post nothing any more: it has closed its file, or its process has ended.
  bool is_gone(size_t rank) const {
    return region(rank).header().closed.load() != 0 || !region(rank).is_owned();
  }

  // Waits until a rank has posted an exchange; false if `end` comes first.
  bool await(size_t rank, uint64_t number, Clock::time_point end) const {
    const Region& from = region(rank);
    for (int i = 0; i < num_spins_; ++i) {
      if (from.has_posted(number)) {
        return true;
      }
      pause();
    }
    Header& header = from.header();
    while (!from.has_posted(number)) {
      header.sleepers.fetch_add(1, std::memory_order_seq_cst);
      const uint32_t posted = header.posted.load(std::memory_order_seq_cst);
      const auto left = std::min<Clock::duration>(kLookEvery, end - Clock::now());
      if (!Region::precedes(number, posted) && left.count() > 0) {
        const timespec most{0, std::chrono::duration_cast<std::chrono::nanoseconds>(left).count()};
        futex(header.posted, FUTEX_WAIT, posted, &most);
      }
      header.sleepers.fetch_sub(1, std::memory_order_seq_cst);
      if (from.has_posted(number)) {
        break;
      }
      const bool has_gone = is_gone(rank);
      if (from.has_posted(number)) {
        break; // posted before it went
      }
      TORCH_CHECK_WITH(DistNetworkError, !has_gone, "shared memory: connection closed by rank ", rank);
      if (Clock::now() >= end) {
        return false;
      }
    }
    return true;
  }

  // Copies the rows that a rank has posted for this rank, and counts this rank as a reader.
  void take(size_t rank, uint64_t number, char* out, size_t bytes) const {
    const Region& from = region(rank);
    const Part& part = from.part(number, rank_);
    const uint64_t found = is_for_this(from, number) ? part.bytes : 0;
    TORCH_CHECK(found == bytes, "shared memory: expected ", bytes, " bytes from rank ", rank, ", got ", found);
    copy(out, from.data(part.begin), bytes);
    from.read(number).fetch_add(1, std::memory_order_release);
  }

  // Gives up the rows of a rank for this rank. A later `post` counts them as read, so that their memory becomes free.
  void abandon(size_t rank, uint64_t number) {
    const std::lock_guard guard(mutex_);
    abandoned_.emplace_back(rank, number);
  }

 private:
  struct Sent {
    uint64_t number;
    size_t begin;
    uint32_t readers;
  };

  Region& own() const {
    return *regions_[rank_];
  }

  // Returns false if the rank has sent nothing to this rank, which it then does not count as a reader.
  bool is_for_this(const Region& from, uint64_t number) const {
    const Part& part = from.part(number, rank_);
    return part.number == number && part.bytes > 0;
  }

  void forget_read() {
    std::erase_if(abandoned_, [&](const std::pair<size_t, uint64_t>& each) {
      const auto& [rank, number] = each;
      const Region& from = region(rank);
      if (!from.has_posted(number)) {
        return false;
      }
      if (is_for_this(from, number)) {
        from.read(number).fetch_add(1, std::memory_order_release);
      }
      return true;
    });
    while (!underway_.empty()) {
      const Sent& first = underway_.front();
      if (own().read(first.number).load(std::memory_order_acquire) < first.readers) {
        break;
      }
      if (first.readers > 0) {
        taken_.erase(first.begin);
      }
      underway_.pop_front();
    }
    if (underway_.empty() && used_ > kKeptBytes) {
      own().give_back(kKeptBytes, used_);
      used_ = kKeptBytes;
    }
  }

  // Returns the first place in the file with room for `total` bytes.
  size_t find_place(size_t total) {
    size_t begin = 0;
    for (const auto& [from, to] : taken_) {
      if (total <= from - begin) {
        break;
      }
      begin = to;
    }
    TORCH_CHECK(
        begin + total <= own().data_bytes(), "shared memory: expected at most ", own().data_bytes(),
        " bytes underway, got ", begin + total);
    used_ = std::max(used_, begin + total);
    return begin;
  }

  size_t rank_;
  Milliseconds timeout_;
  pid_t process_;
  uint64_t token_ = 0;
  bool is_made_ = false;
  int num_spins_ = 0;
  std::vector<std::unique_ptr<Region>> regions_;
  std::mutex mutex_;
  std::deque<Sent> underway_;
  std::map<size_t, size_t> taken_; // begin of rows underway -> their end
  std::vector<std::pair<size_t, uint64_t>> abandoned_;
  size_t used_ = 0;
};

// The rows of other ranks for one result, which `wait` copies.
class SharedWork : public c10d::Work {
 public:
  SharedWork(std::shared_ptr<Exchanges> exchanges, uint64_t number, at::Tensor out, const std::vector<size_t>& bytes)
      : exchanges_(std::move(exchanges)),
        number_(number),
        end_(Clock::now() + exchanges_->timeout()),
        out_(std::move(out)) {
    const size_t rank = exchanges_->rank();
    size_t begin = 0;
    for (size_t from = 0; from < bytes.size(); begin += bytes[from++]) {
      if (from != rank && bytes[from] > 0) {
        due_.push_back({from, begin, bytes[from]});
      }
    }
    // Each rank begins with the rows of the rank after itself, so that not all read the same file at once.
    const auto later = [&](const Due& each) { return each.from > rank; };
    std::rotate(due_.begin(), std::find_if(due_.begin(), due_.end(), later), due_.end());
  }
  SharedWork(const SharedWork&) = delete;
  SharedWork& operator=(const SharedWork&) = delete;
  ~SharedWork() override {
    for (const Due& each : due_) {
      exchanges_->abandon(each.from, number_);
    }
  }

  // Returns true if `wait` would return or raise at once.
  bool isCompleted() override {
    const std::unique_lock guard(mutex_, std::try_to_lock);
    if (!guard.owns_lock()) {
      return false; // another thread waits
    }
    const auto is_awaited = [&](const Due& each) {
      return !exchanges_->region(each.from).has_posted(number_) && !exchanges_->is_gone(each.from);
    };
    return has_failed_ || Clock::now() >= end_ || std::none_of(due_.begin(), due_.end(), is_awaited);
  }
  bool isSuccess() const override {
    return !has_failed_;
  }

  bool wait(Milliseconds timeout) override {
    const std::lock_guard guard(mutex_);
    const auto end = timeout == kNoTimeout ? end_ : std::min(end_, Clock::now() + timeout);
    for (; !due_.empty(); due_.pop_front()) {
      const Due& next = due_.front();
      await(next.from, end);
      exchanges_->take(next.from, number_, static_cast<char*>(out_.mutable_data_ptr()) + next.begin, next.bytes);
    }
    out_ = at::Tensor();
    return true;
  }

 private:
  struct Due {
    size_t from, begin, bytes;
  };

  void await(size_t rank, Clock::time_point end) {
    bool has_come = false;
    try {
      has_come = exchanges_->await(rank, number_, end);
    } catch (...) {
      fail();
      throw;
    }
    if (!has_come && end == end_) {
      fail();
    }
    const double seconds = 1e-3 * static_cast<double>(exchanges_->timeout().count());
    TORCH_CHECK_WITH(
        DistNetworkError, !has_failed_, "shared memory: timed out after ", seconds, " s in which rank ", rank,
        " has posted nothing");
    TORCH_CHECK(has_come, "shared memory: rank ", rank, " has not come yet");
  }

  // Closes this rank's exchanges for all ranks, as Gloo does. Otherwise a later exchange could meet the missed one.
  void fail() {
    has_failed_ = true;
    exchanges_->close();
  }

  std::shared_ptr<Exchanges> exchanges_;
  uint64_t number_;
  Clock::time_point end_;
  at::Tensor out_;
  std::deque<Due> due_;
  bool has_failed_ = false;
  std::mutex mutex_;
};

class SharedMemory {
 public:
  SharedMemory(size_t rank, size_t size, double seconds)
      : exchanges_(std::make_shared<Exchanges>(rank, size, seconds)) {
  }

  std::pair<int64_t, uint64_t> place() const {
    return exchanges_->place();
  }
  bool open(size_t rank, int64_t process, int64_t fd, uint64_t token) {
    return exchanges_->open(rank, process, fd, token);
  }

  c10::intrusive_ptr<c10d::Work> all_to_all(
      const at::Tensor& out, const at::Tensor& x, const std::vector<int64_t>& receive, const std::vector<int64_t>& send,
      uint64_t number) {
    return start("all_to_all", out, x, bytes_of(out, receive), bytes_of(x, send), false, number);
  }
  c10::intrusive_ptr<c10d::Work> all_gather(const at::Tensor& out, const at::Tensor& x, uint64_t number) {
    const Sizes bytes(exchanges_->size(), x.nbytes());
    return start("all_gather", out, x, bytes, bytes, true, number);
  }

 private:
  using Sizes = std::vector<size_t>;

  Sizes bytes_of(const at::Tensor& rows, const std::vector<int64_t>& sizes) const {
    const size_t num_ranks = exchanges_->size();
    if (sizes.empty()) {
      return Sizes(num_ranks, rows.nbytes() / num_ranks);
    }
    const size_t row = rows.numel() == 0 ? 0 : rows.nbytes() / static_cast<size_t>(rows.size(0));
    Sizes bytes;
    for (const int64_t size : sizes) {
      TORCH_CHECK(size >= 0, "all_to_all: expected sizes to be at least 0, got ", sizes);
      bytes.push_back(row * static_cast<size_t>(size));
    }
    return bytes;
  }

  static size_t sum(const Sizes& sizes, size_t count) {
    return std::accumulate(sizes.begin(), sizes.begin() + static_cast<int64_t>(count), size_t{0});
  }

  c10::intrusive_ptr<c10d::Work> start(
      const char* name, const at::Tensor& out, const at::Tensor& x, const Sizes& due, const Sizes& sent, bool is_same,
      uint64_t number) {
    const size_t rank = exchanges_->rank(), size = exchanges_->size();
    TORCH_CHECK(
        due.size() == size && sent.size() == size && sum(due, size) == out.nbytes() && due[rank] == sent[rank] &&
            (is_same ? sent[rank] : sum(sent, size)) == x.nbytes(),
        name, ": expected a size for each of ", size, " ranks that sum to the rows, got ", due, " and ", sent);
    TORCH_CHECK(
        out.is_cpu() && out.is_contiguous() && x.is_cpu() && x.is_contiguous(), name,
        ": expected contiguous rows on a CPU");
    RECORD_FUNCTION(std::string("shared_memory:") + name, std::vector<c10::IValue>());
    const auto* from = static_cast<const char*>(x.const_data_ptr());
    exchanges_->post(number, from, sent, is_same);
    auto* own = static_cast<char*>(out.mutable_data_ptr()) + sum(due, rank);
    copy(own, from + (is_same ? 0 : sum(sent, rank)), sent[rank]);
    return c10::make_intrusive<SharedWork>(exchanges_, number, out, due);
  }

  std::shared_ptr<Exchanges> exchanges_;
};

} // namespace

void bind_shared_memory(pybind11::module_& module) {
  namespace py = pybind11;
  using others_run = py::call_guard<py::gil_scoped_release>;
  py::class_<SharedMemory>(module, "SharedMemory", "Exchanges between the ranks of one host.")
      .def(py::init<size_t, size_t, double>(), py::arg("rank"), py::arg("size"), py::arg("seconds"))
      .def(
          "place", &SharedMemory::place,
          "Returns descriptor and token of this rank's file; the descriptor is -1 if the system refused the file.")
      .def(
          "open", &SharedMemory::open, "Maps the file of another rank. Returns True if the system allowed it.",
          py::arg("rank"), py::arg("process"), py::arg("fd"), py::arg("token"))
      .def(
          "all_to_all", &SharedMemory::all_to_all, others_run(),
          "Posts rows for each rank. Returns a Work that fills `out`. Without sizes each rank gets as many rows.",
          py::arg("out"), py::arg("x"), py::arg("receive"), py::arg("send"), py::arg("number"))
      .def(
          "all_gather", &SharedMemory::all_gather, others_run(),
          "Posts a tensor for all ranks. Returns a Work that fills `out`.", py::arg("out"), py::arg("x"),
          py::arg("number"));
}

} // namespace moe_ext::runtime

#else
#include "runtime/runtime.h"

namespace moe_ext::runtime {

void bind_shared_memory(pybind11::module_&) {
}

} // namespace moe_ext::runtime
#endif
