// The selective scan's CUDA kernels, emulated, against a serial loop, under every schedule.
#include <gtest/gtest.h>

#include <cmath>

#include "recurrence/selective_scan_kernels.cuh"
#include "schedules.h"

namespace moe_ext::recurrence {
namespace {

struct Case {
  int64_t batch, groups, heads, length, dim;
  bool packed = false;
};

std::ostream& operator<<(std::ostream& out, const Case& c) {
  return out << c.batch << "x" << c.groups << "x" << c.heads << "x" << c.length << "x" << c.dim;
}

std::vector<double> random_doubles(int64_t n, unsigned seed, double low = -1, double high = 1) {
  std::mt19937 generator(seed);
  std::uniform_real_distribution<double> uniform(low, high);
  std::vector<double> values(n);
  for (double& value : values) {
    value = uniform(generator);
  }
  return values;
}

struct Problem {
  Case c;
  std::vector<double> x, dt, a, b, cc, state, grad_out, grad_last;
  std::vector<int64_t> documents;

  explicit Problem(const Case& given)
      : c(given),
        x(random_doubles(c.batch * c.heads * c.length, 1)),
        dt(random_doubles(c.batch * c.heads * c.length, 2, 0, 1)),
        a(random_doubles(c.heads * c.dim, 3, -1, 0)),
        b(random_doubles(c.batch * c.groups * c.length * c.dim, 4)),
        cc(random_doubles(c.batch * c.groups * c.length * c.dim, 5)),
        state(random_doubles(c.batch * c.heads * c.dim, 6)),
        grad_out(random_doubles(c.batch * c.heads * c.length, 7)),
        grad_last(random_doubles(c.batch * c.heads * c.dim, 8)),
        documents(c.length) {
    for (int64_t t = 0; t < c.length; ++t) {
      documents[t] = c.packed ? t / 5 + (t > 66) : 0;
    }
  }

  ScanInput<double> input() const {
    const ScanStrides strides = {c.heads * c.length, c.length, 1};
    return {
        x.data(), dt.data(), strides,  strides, a.data(), b.data(), cc.data(), c.packed ? documents.data() : nullptr,
        0,        c.batch,   c.groups, c.heads, c.length, c.dim};
  }
  int64_t chunks() const {
    return ceil_div(c.length, int64_t{kKeptEvery});
  }
  bool fresh(int64_t t) const {
    return c.packed && t > 0 && documents[t] != documents[t - 1];
  }
};

struct Results {
  std::vector<double> out, last, x, dt, a, b, c, state;

  explicit Results(const Problem& p)
      : out(p.x.size()),
        last(p.state.size()),
        x(p.x.size()),
        dt(p.x.size()),
        a(p.state.size()),
        b(p.b.size()),
        c(p.b.size()),
        state(p.state.size()) {
  }
};

Results serial(const Problem& p) {
  const Case& c = p.c;
  Results found(p);
  for (int64_t at = 0; at < c.batch * c.heads; ++at) {
    const int64_t row = at / c.heads, h = at % c.heads, group = row * c.groups + h / (c.heads / c.groups);
    for (int64_t k = 0; k < c.dim; ++k) {
      std::vector<double> before(c.length);
      double s = p.state[at * c.dim + k];
      const double rate = p.a[h * c.dim + k];
      for (int64_t t = 0; t < c.length; ++t) {
        const int64_t i = at * c.length + t, shared = (group * c.length + t) * c.dim + k;
        before[t] = p.fresh(t) ? 0 : s;
        s = std::exp(p.dt[i] * rate) * before[t] + p.dt[i] * p.x[i] * p.b[shared];
        found.out[i] += p.cc[shared] * s;
      }
      found.last[at * c.dim + k] = s;
      double grad = p.grad_last[at * c.dim + k];
      for (int64_t t = c.length - 1; t >= 0; --t) {
        const int64_t i = at * c.length + t, shared = (group * c.length + t) * c.dim + k;
        const double decay = std::exp(p.dt[i] * rate), kept = decay * before[t], taken = p.dt[i] * p.x[i];
        grad += p.cc[shared] * p.grad_out[i];
        found.c[shared] += p.grad_out[i] * (kept + taken * p.b[shared]);
        found.b[shared] += grad * taken;
        found.x[i] += grad * p.b[shared] * p.dt[i];
        found.dt[i] += grad * p.b[shared] * p.x[i] + grad * kept * rate;
        found.a[at * c.dim + k] += grad * kept * p.dt[i];
        grad = p.fresh(t) ? 0 : grad * decay;
      }
      found.state[at * c.dim + k] = grad;
    }
  }
  return found;
}

void expect_near(const std::vector<double>& actual, const std::vector<double>& expected, const char* name) {
  ASSERT_EQ(actual.size(), expected.size()) << name;
  for (size_t i = 0; i < actual.size(); ++i) {
    ASSERT_NEAR(actual[i], expected[i], 1e-11 * (1 + std::abs(expected[i]))) << name << " " << i;
  }
}

class SelectiveScan : public simt::ScheduleTest<Case> {};

TEST_P(SelectiveScan, EqualsASerialLoop) {
  const Problem p(param());
  const Case& c = p.c;
  const Results expected = serial(p);
  Results found(p);
  const ScanStrides strides = {c.heads * c.length, c.length, 1};
  std::vector<double> states(c.batch * c.heads * p.chunks() * c.dim);
  launch_selective_scan(
      p.input(), p.state.data(), found.out.data(), strides, found.last.data(), states.data(), nullptr);
  expect_near(found.out, expected.out, "out");
  expect_near(found.last, expected.last, "last");

  const int64_t parts = scan_parts(c.batch * c.groups, c.heads / c.groups, c.dim);
  std::vector<double> b(parts * p.b.size()), shares(b.size());
  found.state = p.grad_last;
  launch_selective_scan_backward(
      p.input(),
      {p.grad_out.data(), strides, states.data(), found.x.data(), found.dt.data(), strides, strides, found.state.data(),
       found.a.data(), b.data(), shares.data()},
      parts, nullptr);
  for (size_t i = 0; i < b.size(); ++i) {
    found.b[i % p.b.size()] += b[i];
    found.c[i % p.b.size()] += shares[i];
  }
  expect_near(found.x, expected.x, "grad of x");
  expect_near(found.dt, expected.dt, "grad of dt");
  expect_near(found.a, expected.a, "grad of A");
  expect_near(found.b, expected.b, "grad of B");
  expect_near(found.c, expected.c, "grad of C");
  expect_near(found.state, expected.state, "grad of the state");
}

INSTANTIATE_TEST_SUITE_P(
    Sizes, SelectiveScan,
    simt::under_all_schedules<Case>({
        {1, 1, 1, 1, 1},
        {2, 2, 4, 65, 5, true},
        {1, 1, 9, 130, 16},
        {1, 1, 3, 5, 33},
        {1, 2, 6, 66, 70, true},
        {1, 1, 2, 100, 128},
        {1, 1, 0, 3, 4},
        {2, 1, 37, 3, 2},
    }));

} // namespace
} // namespace moe_ext::recurrence
