// Kernels over whole vectors: passes in blocks, a buffer that grows with what is found, and exact top-k. No Python in here.
#pragma once

#include <cstdint>
#include <vector>

#include "kernels.hpp"

namespace sparsync {

// Elements found, positions ascending. Keeps its memory from call to call, up to a limit.
class Found {
  public:
    Found() = default;
    Found(const Found &) = delete;
    Found &operator=(const Found &) = delete;
    ~Found();

    int64_t count = 0;
    int32_t *index() { return index_; }
    float *value() { return value_; }
    void reserve(int64_t elements);  // room for as many and the slack of a Sink, keeping what is there
    Sink end() { return {index_ + count, value_ + count}; }
    void release();  // gives the memory back where it is much

  private:
    int64_t capacity_ = 0;
    int32_t *index_ = nullptr;
    float *value_ = nullptr;
};

struct Span {
    int64_t start, stop;
};

struct Gradient {
    const void *data;
    Type type;
};

enum class Order { magnitude, number };  // NaN counts as infinity; there is none among numbers

struct Top {
    int64_t k;
    Order order;
    int32_t lowest;     // of what may be selected: a magnitude's bits, or a number
    bool guessed;       // whether `guess` is expected to be reached by k elements, and by not many more
    int32_t guess = 0;  // a wrong one costs time only
};

// Each leaves what it selects in `found`. Magnitudes are from `range`, both ends included.
void select(const Passes &passes, const float *x, int64_t n, Range range, Found &found);
void top(const Passes &passes, const float *x, const std::vector<Span> &spans, Top wanted, Found &found);
// out = residual + grad, and `top` of it outside `skip`; returns the greatest magnitude of the sums.
uint32_t add_top(const Passes &passes, const float *residual, Gradient grad, float *out, int64_t n, Span skip, Top wanted,
                 Found &found);

// Reduces `found` to its k elements of highest order, 1 <= k <= count; of equal ones those that come first. Returns the order of the
// lowest of them.
uint32_t keep_top(Found &found, int64_t k, Order order);

}  // namespace sparsync
