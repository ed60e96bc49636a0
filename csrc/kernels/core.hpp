// Kernels over whole vectors: passes in blocks and threads, buffers that grow with what is found, and exact top-k. No Python in here.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "kernels.hpp"

namespace sparsync {

// Elements found by one thread, positions ascending. Keeps its memory from call to call, up to a limit.
class Found {
  public:
    Found() = default;
    Found(Found &&other) noexcept;
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

using Parts = std::vector<Found>;  // one for each thread; in order, their positions ascend

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

const Kernels *find(const std::string &level);  // null for none such
std::vector<std::string> levels();              // the fastest first

void plain(const Kernels &kernels, const float *a, float *b, int64_t n, int threads);
uint32_t largest(const Kernels &kernels, const float *x, int64_t n);
uint32_t add(const Kernels &kernels, const float *residual, Gradient grad, float *out, int64_t n, int threads);

// These leave what they select in `parts`, and return the largest magnitude of the sums where there are any.
void select(const Kernels &kernels, const float *x, int64_t n, Range range, int threads, Parts &parts);
uint32_t add_take(const Kernels &kernels, float *residual, Gradient grad, int64_t n, Span span, Range range, int threads,
                  Parts &parts);
void top(const Kernels &kernels, const float *x, const std::vector<Span> &spans, Top wanted, int threads, Parts &parts);
// Nothing is selected inside `skip`.
uint32_t add_top(const Kernels &kernels, const float *residual, Gradient grad, float *out, int64_t n, Span skip, Top wanted,
                 int threads, Parts &parts);

// Keeps the k largest of what was found; of equal ones those that come first. Returns the order of the smallest kept.
uint32_t keep_largest(Found &found, int64_t k, Order order);

}  // namespace sparsync
