// The gated delta rule's CUDA kernels, emulated, against a loop over positions, under every schedule.
#include <gtest/gtest.h>

#include <cmath>

#include "recurrence/delta_rule_kernels.cuh"
#include "schedules.h"

namespace moe_ext::recurrence {
namespace {

struct Case {
  int64_t batch, groups, heads, length;
  int dim, v_dim;
  bool has_beta = true, packed = false;
};

std::ostream& operator<<(std::ostream& out, const Case& c) {
  return out << c.batch << "x" << c.groups << "x" << c.heads << "x" << c.length << "x" << c.dim << "x" << c.v_dim;
}

std::vector<double> uniform(int64_t n, unsigned seed, double low = -1, double high = 1) {
  std::mt19937 generator(seed);
  std::uniform_real_distribution<double> distribution(low, high);
  std::vector<double> values(n);
  for (double& value : values) {
    value = distribution(generator);
  }
  return values;
}

struct Problem {
  Case c;
  std::vector<double> q, k, v, g, beta, state, grad_out, grad_last;
  std::vector<int64_t> documents;

  explicit Problem(const Case& given)
      : c(given),
        q(uniform(c.batch * c.groups * c.length * c.dim, 1)),
        k(uniform(c.batch * c.groups * c.length * c.dim, 2, -0.4, 0.4)),
        v(uniform(c.batch * c.heads * c.length * c.v_dim, 3)),
        g(uniform(c.batch * c.heads * c.length, 4, -0.5, 0)),
        beta(uniform(c.batch * c.heads * c.length, 5, 0, 1)),
        state(uniform(c.batch * c.heads * c.dim * c.v_dim, 6)),
        grad_out(uniform(c.batch * c.heads * c.length * c.v_dim, 7)),
        grad_last(uniform(c.batch * c.heads * c.dim * c.v_dim, 8)),
        documents(c.length) {
    for (int64_t t = 0; t < c.length; ++t) {
      documents[t] = (t > 2) + (t > 3) + (t > 15) + (t > 20) + (t > 36);
    }
  }

  RuleInput<double> input() const {
    const int64_t k_row = c.dim, v_row = c.v_dim;
    const auto rows = [&](const std::vector<double>& t, int64_t heads, int64_t row) {
      return RuleRows<const double>{t.data(), heads * c.length * row, c.length * row, row};
    };
    return {
        rows(q, c.groups, k_row),
        rows(k, c.groups, k_row),
        rows(v, c.heads, v_row),
        g.data(),
        c.has_beta ? beta.data() : nullptr,
        c.packed ? documents.data() : nullptr,
        0,
        c.batch,
        c.groups,
        c.heads,
        c.length,
        c.dim,
        c.v_dim,
        std::min(rule_columns<double>(c.dim), 4)};
  }
  bool fresh(int64_t t) const {
    return c.packed && t > 0 && documents[t] != documents[t - 1];
  }
};

struct Results {
  std::vector<double> out, last, q, k, v, g, beta, state;

  explicit Results(const Problem& p)
      : out(p.v.size()),
        last(p.state),
        q(p.q.size()),
        k(p.k.size()),
        v(p.v.size()),
        g(p.g.size()),
        beta(p.g.size()),
        state(p.grad_last) {
  }
};

Results serial(const Problem& p) {
  const Case& c = p.c;
  Results found(p);
  const int64_t size = int64_t{c.dim} * c.v_dim;
  for (int64_t at = 0; at < c.batch * c.heads; ++at) {
    const int64_t shared = at / c.heads * c.groups + at % c.heads / (c.heads / c.groups);
    std::vector<std::vector<double>> decayed(c.length), after(c.length), news(c.length);
    std::vector<double> s(p.state.begin() + at * size, p.state.begin() + (at + 1) * size);
    for (int64_t t = 0; t < c.length; ++t) {
      const double* q = p.q.data() + (shared * c.length + t) * c.dim;
      const double* k = p.k.data() + (shared * c.length + t) * c.dim;
      const double* v = p.v.data() + (at * c.length + t) * c.v_dim;
      for (double& x : s) {
        x = p.fresh(t) ? 0 : x * std::exp(p.g[at * c.length + t]);
      }
      decayed[t] = s;
      news[t].assign(v, v + c.v_dim);
      for (int e = 0; c.has_beta && e < c.v_dim; ++e) {
        for (int d = 0; d < c.dim; ++d) {
          news[t][e] -= k[d] * s[d * c.v_dim + e];
        }
        news[t][e] *= p.beta[at * c.length + t];
      }
      for (int d = 0; d < c.dim; ++d) {
        for (int e = 0; e < c.v_dim; ++e) {
          s[d * c.v_dim + e] += k[d] * news[t][e];
          found.out[(at * c.length + t) * c.v_dim + e] += q[d] * s[d * c.v_dim + e];
        }
      }
      after[t] = s;
    }
    std::copy(s.begin(), s.end(), found.last.begin() + at * size);
    std::vector<double> grad(p.grad_last.begin() + at * size, p.grad_last.begin() + (at + 1) * size);
    for (int64_t t = c.length - 1; t >= 0; --t) {
      const int64_t i = at * c.length + t;
      const double* q = p.q.data() + (shared * c.length + t) * c.dim;
      const double* k = p.k.data() + (shared * c.length + t) * c.dim;
      const double* dy = p.grad_out.data() + i * c.v_dim;
      const double beta = p.beta[i];
      std::vector<double> of_news(c.v_dim), read(c.v_dim);
      for (int d = 0; d < c.dim; ++d) {
        for (int e = 0; e < c.v_dim; ++e) {
          double& one = grad[d * c.v_dim + e];
          one += q[d] * dy[e];
          found.q[(shared * c.length + t) * c.dim + d] += after[t][d * c.v_dim + e] * dy[e];
          found.k[(shared * c.length + t) * c.dim + d] += one * news[t][e];
          of_news[e] += one * k[d];
          read[e] += k[d] * decayed[t][d * c.v_dim + e];
        }
      }
      for (int e = 0; e < c.v_dim; ++e) {
        found.v[i * c.v_dim + e] = c.has_beta ? beta * of_news[e] : of_news[e];
        found.beta[i] += of_news[e] * (p.v[i * c.v_dim + e] - read[e]);
      }
      for (int d = 0; d < c.dim; ++d) {
        for (int e = 0; e < c.v_dim; ++e) {
          double& one = grad[d * c.v_dim + e];
          if (c.has_beta) {
            found.k[(shared * c.length + t) * c.dim + d] -= decayed[t][d * c.v_dim + e] * beta * of_news[e];
            one -= k[d] * beta * of_news[e];
          }
          found.g[i] += one * decayed[t][d * c.v_dim + e];
          one = p.fresh(t) ? 0 : one * std::exp(p.g[i]);
        }
      }
    }
    std::copy(grad.begin(), grad.end(), found.state.begin() + at * size);
  }
  return found;
}

void expect_near(const std::vector<double>& actual, const std::vector<double>& expected, const char* name) {
  ASSERT_EQ(actual.size(), expected.size()) << name;
  for (size_t i = 0; i < actual.size(); ++i) {
    ASSERT_NEAR(actual[i], expected[i], 1e-11 * (1 + std::abs(expected[i]))) << name << " " << i;
  }
}

// Sums over heads of a group and tiles, and over tiles.
std::vector<double> summed(const std::vector<double>& parts, int64_t size, int64_t outer, int64_t count) {
  std::vector<double> sums(size);
  const int64_t inner = size / std::max<int64_t>(1, outer);
  for (size_t i = 0; i < parts.size(); ++i) {
    sums[i / (inner * count) * inner + i % inner] += parts[i];
  }
  return sums;
}

class DeltaRule : public simt::ScheduleTest<Case> {};

TEST_P(DeltaRule, EqualsALoopOverPositions) {
  const Problem p(param());
  const Case& c = p.c;
  const Results expected = serial(p);
  Results found(p);
  const RuleInput<double> in = p.input();
  std::vector<double> news(c.has_beta ? p.v.size() : 0);
  launch_delta_rule(in, found.out.data(), found.last.data(), c.has_beta ? news.data() : nullptr, nullptr);
  expect_near(found.out, expected.out, "out");
  expect_near(found.last, expected.last, "last");

  const int64_t heads = c.batch * c.heads, tiles = in.tiles(), per_group = c.heads / c.groups;
  std::vector<double> q(heads * tiles * c.length * c.dim), k(q.size()), g(heads * tiles * c.length), beta(g.size());
  std::vector<double> states(heads * ceil_div(c.length, int64_t{kRuleChunk}) * c.dim * c.v_dim);
  const RuleRows<const double> of_out = {p.grad_out.data(), c.heads * c.length * c.v_dim, c.length * c.v_dim, c.v_dim};
  launch_delta_rule_backward(
      in, p.state.data(), states.data(),
      {of_out, c.has_beta ? news.data() : nullptr, states.data(), q.data(), k.data(), found.v.data(), g.data(),
       c.has_beta ? beta.data() : nullptr, found.state.data()},
      nullptr);
  const int64_t pairs = c.batch * c.groups;
  expect_near(summed(q, p.q.size(), pairs, per_group * tiles), expected.q, "grad of q");
  expect_near(summed(k, p.k.size(), pairs, per_group * tiles), expected.k, "grad of k");
  expect_near(found.v, expected.v, "grad of v");
  expect_near(summed(g, p.g.size(), heads, tiles), expected.g, "grad of g");
  if (c.has_beta) {
    expect_near(summed(beta, p.g.size(), heads, tiles), expected.beta, "grad of beta");
  }
  expect_near(found.state, expected.state, "grad of the state");
}

INSTANTIATE_TEST_SUITE_P(
    Sizes, DeltaRule,
    simt::under_all_schedules<Case>({
        {1, 1, 1, 1, 1, 1},
        {1, 1, 1, 17, 3, 2},
        {2, 1, 2, 40, 5, 9, true, true},
        {1, 2, 4, 33, 4, 5, false, true},
        {1, 1, 2, 16, 33, 3, false},
        {1, 1, 1, 5, 130, 6},
    }));

} // namespace
} // namespace moe_ext::recurrence
