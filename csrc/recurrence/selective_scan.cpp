#include "recurrence/selective_scan.h"

#include "common/dispatch.h"
#include "common/library.h"
#include "recurrence/checks.h"

namespace moe_ext::recurrence {

MOE_EXT_SCHEMAS(m) {
  m.def(
      "selective_scan(Tensor x, Tensor dt, Tensor A, Tensor B, Tensor C, Tensor state, Tensor? documents) -> "
      "(Tensor out, Tensor last, Tensor states)");
  m.def(
      "_selective_scan_backward(Tensor grad_out, Tensor grad_last, Tensor x, Tensor dt, Tensor A, Tensor B, Tensor C, "
      "Tensor? documents, Tensor states) -> (Tensor grad_x, Tensor grad_dt, Tensor grad_A, Tensor grad_B, "
      "Tensor grad_C, Tensor grad_state)");
}

namespace {

// Check all arguments but the state, which the backward pass does not take.
void check_inputs(const char* op, const SelectiveScanArgs& args) {
  const Tensor &x = args.x, &b = args.b;
  check_wide(op, "x", x);
  check_dim(op, "x", x, 3, "[B, H, L]");
  check_like(op, "dt", args.dt, "x", x);
  check_beside(op, "A", args.a, "x", x, 2, "[H, K]");
  check_size(op, "A", args.a, 0, x.size(1), "the heads of x");
  check_beside(op, "B", b, "x", x, 4, "[B, G, L, K]");
  check_size(op, "B", b, 0, x.size(0), "the batch of x");
  check_size(op, "B", b, 2, x.size(2), "the positions of x");
  check_size(op, "B", b, 3, args.a.size(1), "the columns of A");
  MOE_CHECK(
      b.size(1) > 0 ? x.size(1) % b.size(1) == 0 : x.size(1) == 0, op,
      ": expected the heads of x to be a multiple of the groups of B, got ", x.size(1), " and ", b.size(1));
  check_like(op, "C", args.c, "B", b);
  check_documents(op, args.documents, x, x.size(0), x.size(2));
}

void check_state(const char* op, const char* name, const Tensor& state, const SelectiveScanArgs& args) {
  check_beside(op, name, state, "x", args.x, 3, "[B, H, K]");
  check_size(op, name, state, 0, args.x.size(0), "the batch of x");
  check_size(op, name, state, 1, args.x.size(1), "the heads of x");
  check_size(op, name, state, 2, args.a.size(1), "the columns of A");
}

} // namespace

void check_selective_scan(const char* op, const SelectiveScanArgs& args) {
  check_inputs(op, args);
  check_state(op, "state", args.state, args);
}

void check_selective_scan_backward(
    const char* op, const SelectiveScanArgs& args, const Tensor& grad_out, const Tensor& grad_last,
    const Tensor& states) {
  check_inputs(op, args);
  check_like(op, "grad_out", grad_out, "x", args.x);
  check_state(op, "grad_last", grad_last, args);
  check_beside(op, "states", states, "x", args.x, 4, "[B, H, N, K]");
  check_size(op, "states", states, 0, args.x.size(0), "the batch of x");
  check_size(op, "states", states, 1, args.x.size(1), "the heads of x");
  check_size(op, "states", states, 2, (args.x.size(2) + kScanChunk - 1) / kScanChunk, "a state for 64 positions");
  check_size(op, "states", states, 3, args.a.size(1), "the columns of A");
}

} // namespace moe_ext::recurrence
