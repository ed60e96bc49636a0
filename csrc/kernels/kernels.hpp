// One pass over a stretch of a vector, in one instruction set. Everything above a pass (blocks, buffers) is compiled once, for every machine,
// in the other files; files with instruction sets of their own hold passes only, and nothing the linker could share.
#pragma once

#include <cstdint>

namespace sparsync {

enum class Type : int32_t { float32 = 0, bfloat16 = 1, float16 = 2 };

constexpr uint32_t kMagnitude = 0x7fffffffu;  // the bits of a float without its sign: ordered as the magnitudes are
constexpr uint32_t kInfinity = 0x7f800000u;   // magnitudes above this one are NaN

// What a pass writes for each element that it selects; both arrays need kSlack elements more than can be selected.
struct Sink {
    int32_t *index;
    float *value;
};
constexpr int64_t kSlack = 64;

// The magnitudes from `low` to `high`, both included.
struct Range {
    uint32_t low, high;
};
constexpr Range kNone{kInfinity, 0};

// v = beta2 v + rest2 g^2; step = rate g / (sqrt(scale v) + eps), each operation rounded; rest2 is 1 - beta2, rounded once.
struct AdamStep {
    float beta2, rest2, eps, rate;
};

// m = beta1 m + rest1 mean; a = decay a - length m, each operation rounded; rest1 is 1 - beta1, rounded once.
struct MomentumStep {
    float beta1, rest1, decay, length;
};

struct Passes {
    // out = residual + grad; the greatest magnitude of out.
    uint32_t (*add)(const float *residual, const void *grad, Type type, float *out, int64_t n);
    // The elements of x whose magnitude is in range, at positions from `base` on; how many.
    int64_t (*select)(const float *x, int64_t n, int32_t base, Range range, Sink sink);
    // The elements of `count` rows of `row` elements, which begin at x + starts[0], ..., at positions from `base` on; how many.
    int64_t (*select_rows)(const float *x, const int32_t *starts, int64_t count, int64_t row, int32_t base, Range range, Sink sink);
    // add and select in one; `greatest` becomes at least the greatest magnitude of out.
    int64_t (*add_select)(const float *residual, const void *grad, Type type, float *out, int64_t n, int32_t base, Range range,
                          Sink sink, uint32_t *greatest);
    // The greatest magnitude of x.
    uint32_t (*max_magnitude)(const float *x, int64_t n);
    // The sum of the squares of factor * grad.
    double (*squares)(const void *grad, Type type, int64_t n, float factor);
    // out = factor * grad.
    void (*scaled)(float *out, const void *grad, Type type, int64_t n, float factor);
    // out = grad / divisor.
    void (*divided)(float *out, const void *grad, Type type, int64_t n, float divisor);
    // out = the step of g = factor * grad, or what was there and the step, if it `adds`; each element has its scale.
    void (*adam_step)(float *out, bool adds, const void *grad, Type type, float factor, float *v, const float *scale, int64_t n,
                      AdamStep step);
    // to = weights - share unsent, each operation rounded.
    void (*less)(float *to, const float *weights, const float *unsent, int64_t n, float share);
    // out = (sqrt(scale v) + floor) mean, each operation rounded.
    void (*rescaled)(float *out, const float *mean, const float *v, const float *scale, int64_t n, float floor);
    void (*momentum_step)(float *a, float *m, const float *mean, int64_t n, MomentumStep step);
    // Of each of n / block blocks of x, of which `count` elements are not padding, the sum with the signs of the places from `first` on,
    // and the sum of squares; halves are added. `block` is a power of two from 16 on. Overwrites x, and `square`, which is as long.
    void (*sketch)(float *x, int64_t count, float *square, int64_t n, int64_t block, int64_t first, uint32_t key, float *sums,
                   float *squares);
    // The sums of these blocks, with halves added. Overwrites x.
    void (*block_sums)(float *x, int64_t n, int64_t block, float *sums);
};

// Null where this build or this processor lacks the instructions.
const Passes *passes_scalar();
const Passes *passes_avx2();
const Passes *passes_avx512();

}  // namespace sparsync
