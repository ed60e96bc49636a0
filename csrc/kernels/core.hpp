// Kernels over whole vectors: passes in blocks, a buffer that grows with what is found, and exact top-k. No Python in here.
#pragma once

#include <algorithm>
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

struct Top {
    int64_t k;
    int32_t lowest;     // of what may be selected: a magnitude's bits; NaN counts as infinity
    bool guessed;       // whether `guess` is expected to be reached by k elements, and by not many more
    int32_t guess = 0;  // a wrong one costs time only
};

// Each leaves what it selects in `found`. Magnitudes are from `range`, both ends included.
void select(const Passes &passes, const float *x, int64_t n, Range range, Found &found);
void top(const Passes &passes, const float *x, const std::vector<Span> &spans, Top wanted, Found &found);
// out = residual + grad, and `select` of it inside `span`; returns the greatest magnitude of the sums.
uint32_t add_select(const Passes &passes, const float *residual, Gradient grad, float *out, int64_t n, Span span, Range range,
                    Found &found);
// out = residual + grad, and `top` of it outside `skip`; returns the greatest magnitude of the sums.
uint32_t add_top(const Passes &passes, const float *residual, Gradient grad, float *out, int64_t n, Span skip, Top wanted,
                 Found &found);

// Some elements of a vector, in rows of `row` adjacent ones that begin at the `starts`; the last row has what is left of `length`.
// Places count them in the order of the rows.
struct Rows {
    const int32_t *starts;
    int64_t row, length;

    int64_t count() const { return (length + row - 1) / row; }
    int64_t size(int64_t i) const { return std::min(row, length - i * row); }
};

// `top` of the elements in rows; `found` has their places.
void top_of_rows(const Passes &passes, const float *x, Rows rows, Top wanted, Found &found);

struct Wanted {
    Rows rows;
    Top top;
    Found *found;
};

// out = residual + grad, and `top_of_rows` of it for each of `regions`; returns the greatest magnitude of the sums.
uint32_t add_top_of_rows(const Passes &passes, const float *residual, Gradient grad, float *out, int64_t n,
                         const std::vector<Wanted> &regions);

// The positions of the elements at `place`. False, and nothing done, where a place is not in [0, length).
bool locate(Rows rows, const int32_t *place, int64_t k, int32_t *position);

// to[i] = weights[from + i] - share unsent[from + i]; what is unsent is divided first in rows, whose starts ascend.
void write_own(const Passes &passes, float *to, const float *weights, const float *unsent, int64_t from, int64_t n, Rows rows,
               float divisor, float share);

// Divides the elements in rows, which lie inside of x and do not overlap.
void divide_rows(float *x, Rows rows, float divisor);

// The bits of the smallest magnitude of x; those of a NaN where there is one, 0 where there is nothing.
uint32_t smallest_magnitude(const float *x, int64_t n);

// Reduces `found` to its k elements of largest magnitude, 1 <= k <= count; of equal ones those that come first. Returns the smallest
// magnitude of them; NaN counts as infinity.
uint32_t keep_top(Found &found, int64_t k);

}  // namespace sparsync
