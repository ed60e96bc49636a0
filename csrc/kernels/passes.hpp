// The passes, for any Vec: each of scalar.cpp, avx2.cpp, avx512.cpp defines one and includes this file.
// Everything is in an unnamed namespace, so that no other file runs what was compiled for this one's instructions.
#pragma once

#include <cmath>
#include <cstring>

#include "kernels.hpp"

namespace sparsync {
namespace {

uint32_t bits_of(float value) {
    uint32_t bits;
    std::memcpy(&bits, &value, sizeof bits);
    return bits;
}

float float_of(uint32_t bits) {
    float value;
    std::memcpy(&value, &bits, sizeof value);
    return value;
}

uint32_t magnitude_of(float value) { return bits_of(value) & kMagnitude; }

// The next page's lines: what the processor fetches ahead by itself ends with the page, and passes that do more than add wait for it.
constexpr int64_t kAhead = 1024;
constexpr uintptr_t kLine = 64;

template <class T>
void fetch(const T *p, int64_t elements) {
    // As a number, for what is ahead may lie beyond the end, where no pointer may point; nothing is read there.
    const auto from = reinterpret_cast<uintptr_t>(p) + static_cast<uintptr_t>(kAhead) * sizeof(T);
    for (uintptr_t byte = 0; byte < static_cast<uintptr_t>(elements) * sizeof(T); byte += kLine)
        __builtin_prefetch(reinterpret_cast<const void *>(from + byte));
}

struct Float32 {
    const float *p;
    float one(int64_t i) const { return p[i]; }
    Vec::F many(int64_t i) const { return Vec::load(p + i); }
    void ahead(int64_t i, int64_t elements) const { fetch(p + i, elements); }
};

struct Bfloat16 {
    const uint16_t *p;
    float one(int64_t i) const { return float_of(static_cast<uint32_t>(p[i]) << 16); }
    Vec::F many(int64_t i) const { return Vec::load_bfloat16(p + i); }
    void ahead(int64_t i, int64_t elements) const { fetch(p + i, elements); }
};

struct Float16 {
    const uint16_t *p;
    float one(int64_t i) const {
        const uint32_t sign = (p[i] & 0x8000u) << 16, rest = p[i] & 0x7fffu;
        if (rest >= 0x7c00u) return float_of(sign | kInfinity | (rest & 0x3ffu) << 13);
        // 2^112 corrects the exponent's bias, and makes normal numbers of subnormal ones, exactly.
        return float_of(sign | bits_of(float_of(rest << 13) * 5.192296858534828e33f));
    }
    Vec::F many(int64_t i) const { return Vec::load_float16(p + i); }
    void ahead(int64_t i, int64_t elements) const { fetch(p + i, elements); }
};

template <class Body>
auto with_type(const void *grad, Type type, Body body) {
    if (type == Type::bfloat16) return body(Bfloat16{static_cast<const uint16_t *>(grad)});
    if (type == Type::float16) return body(Float16{static_cast<const uint16_t *>(grad)});
    return body(Float32{static_cast<const float *>(grad)});
}

struct InRange {
    Range range;
    bool one(float value) const {
        const uint32_t magnitude = magnitude_of(value);
        return magnitude >= range.low && magnitude <= range.high;
    }
    Vec::M many(Vec::F value) const {
        return Vec::between(Vec::magnitude(value), Vec::set(range.low), Vec::set(range.high));
    }
};

constexpr int kGroup = Vec::kGroup;  // vectors between two looks at whether anything was selected

struct Selected {
    Sink sink;
    int64_t count = 0;
    void one(bool wanted, int64_t position, float value) {
        sink.index[count] = static_cast<int32_t>(position);
        sink.value[count] = value;
        count += wanted;
    }
    void group(const Vec::M *wanted, int64_t position, const Vec::F *value) {
        if (kGroup > 1) {
            Vec::M any = wanted[0];
            for (int v = 1; v < kGroup; ++v) any = Vec::either(any, wanted[v]);
            if (!Vec::any(any)) return;
        }
        for (int v = 0; v < kGroup; ++v)
            count += Vec::compress(wanted[v], static_cast<int32_t>(position + v * Vec::kWidth), value[v], sink.index + count,
                                   sink.value + count);
    }
};

// Source(i) -> a value or a vector of values at i, perhaps with side effects.
template <class Source, class Test>
int64_t compact(Source &shared, int64_t n, int32_t base, Test test, Sink sink) {
    Source source = shared;  // a copy that no store can be taken to change, so that it stays in registers
    Selected selected{sink};
    constexpr int64_t step = kGroup * Vec::kWidth;
    int64_t i = 0;
    for (; i + step <= n; i += step) {
        Vec::F value[kGroup];
        Vec::M wanted[kGroup];
        source.ahead(i, step);
        for (int v = 0; v < kGroup; ++v) {
            value[v] = source.many(i + v * Vec::kWidth);
            wanted[v] = test.many(value[v]);
            source.keep(i + v * Vec::kWidth, value[v], wanted[v]);
        }
        selected.group(wanted, base + i, value);
    }
    for (; i < n; ++i) {
        const float value = source.one(i);
        const bool wanted = test.one(value);
        source.keep_one(i, value, wanted);
        selected.one(wanted, base + i, value);
    }
    shared = source;
    return selected.count;
}

struct Plain {
    const float *x;
    void ahead(int64_t i, int64_t elements) const { fetch(x + i, elements); }
    Vec::F many(int64_t i) const { return Vec::load(x + i); }
    float one(int64_t i) const { return x[i]; }
    void keep(int64_t, Vec::F, Vec::M) const {}
    void keep_one(int64_t, float, bool) const {}
};

struct MaxMagnitude {
    Vec::I vector = Vec::set(0);
    uint32_t single = 0;
    void many(Vec::F value) { vector = Vec::maximum(vector, Vec::magnitude(value)); }
    void one(float value) { single = magnitude_of(value) > single ? magnitude_of(value) : single; }
    uint32_t result() const {
        const uint32_t most = Vec::reduce(vector);
        return most > single ? most : single;
    }
};

template <class Grad>
struct Adding {
    const float *residual;
    Grad grad;
    float *out;
    MaxMagnitude magnitude{};
    void ahead(int64_t i, int64_t elements) const {
        fetch(residual + i, elements);
        grad.ahead(i, elements);
    }
    Vec::F many(int64_t i) const { return Vec::add(Vec::load(residual + i), grad.many(i)); }
    float one(int64_t i) const { return residual[i] + grad.one(i); }
    void keep(int64_t i, Vec::F value, Vec::M) {
        Vec::store(out + i, value);
        magnitude.many(value);
    }
    void keep_one(int64_t i, float value, bool) {
        out[i] = value;
        magnitude.one(value);
    }
};

uint32_t add(const float *residual, const void *grad, Type type, float *out, int64_t n) {
    return with_type(grad, type, [=](auto source) {
        Adding<decltype(source)> adding{residual, source, out};
        constexpr int64_t step = kGroup * Vec::kWidth;
        int64_t i = 0;
        for (; i + step <= n; i += step) {
            adding.ahead(i, step);
            for (int v = 0; v < kGroup; ++v) adding.keep(i + v * Vec::kWidth, adding.many(i + v * Vec::kWidth), Vec::M{});
        }
        for (; i < n; ++i) adding.keep_one(i, adding.one(i), false);
        return adding.magnitude.result();
    });
}

int64_t select(const float *x, int64_t n, int32_t base, Range range, Sink sink) {
    Plain source{x};
    return compact(source, n, base, InRange{range}, sink);
}

constexpr int64_t kRowsAhead = 8;

// One row, without its neighbours ahead, which belong to others.
struct Row : Plain {
    void ahead(int64_t, int64_t) const {}
};

int64_t select_rows(const float *x, const int32_t *starts, int64_t count, int64_t row, int32_t base, Range range, Sink sink) {
    int64_t found = 0;
    for (int64_t r = 0; r < count; ++r) {
        if (r + kRowsAhead < count)
            for (int64_t i = 0; i < row; i += static_cast<int64_t>(kLine / sizeof(float)))
                __builtin_prefetch(x + starts[r + kRowsAhead] + i);
        Row source{{x + starts[r]}};
        found += compact(source, row, base + static_cast<int32_t>(r * row), InRange{range}, {sink.index + found, sink.value + found});
    }
    return found;
}

int64_t add_select(const float *residual, const void *grad, Type type, float *out, int64_t n, int32_t base, Range range,
                   Sink sink, uint32_t *greatest) {
    return with_type(grad, type, [=](auto source) {
        Adding<decltype(source)> adding{residual, source, out};
        const int64_t count = compact(adding, n, base, InRange{range}, sink);
        const uint32_t most = adding.magnitude.result();
        *greatest = most > *greatest ? most : *greatest;
        return count;
    });
}

uint32_t max_magnitude(const float *x, int64_t n) {
    MaxMagnitude most;
    int64_t i = 0;
    for (; i + Vec::kWidth <= n; i += Vec::kWidth) most.many(Vec::load(x + i));
    for (; i < n; ++i) most.one(x[i]);
    return most.result();
}

// Half a vector of floats, and the doubles that it becomes.
typedef float Half __attribute__((vector_size(2 * Vec::kWidth)));
typedef double Doubles __attribute__((vector_size(4 * Vec::kWidth)));

double squares(const void *grad, Type type, int64_t n, float factor) {
    return with_type(grad, type, [=](auto source) {
        const Vec::F factors = Vec::all(factor);
        Doubles sums[4] = {};
        int64_t i = 0;
        for (; i + 2 * Vec::kWidth <= n; i += 2 * Vec::kWidth) {
            source.ahead(i, 2 * Vec::kWidth);
            for (int v = 0; v < 2; ++v) {
                const Vec::F value = Vec::multiply(source.many(i + v * Vec::kWidth), factors);
                Half halves[2];
                std::memcpy(halves, &value, sizeof value);
                for (int half = 0; half < 2; ++half) {
                    const Doubles wide = __builtin_convertvector(halves[half], Doubles);
                    sums[2 * v + half] += wide * wide;
                }
            }
        }
        double total = 0.0;
        for (; i < n; ++i) {
            const double value = static_cast<double>(source.one(i) * factor);
            total += value * value;
        }
        const Doubles all = (sums[0] + sums[1]) + (sums[2] + sums[3]);
        for (int lane = 0; lane < Vec::kWidth / 2; ++lane) total += all[lane];
        return total;
    });
}

void scaled(float *out, const void *grad, Type type, int64_t n, float factor) {
    with_type(grad, type, [=](auto source) {
        const Vec::F factors = Vec::all(factor);
        int64_t i = 0;
        for (; i + Vec::kWidth <= n; i += Vec::kWidth) {
            source.ahead(i, Vec::kWidth);
            Vec::store(out + i, Vec::multiply(source.many(i), factors));
        }
        for (; i < n; ++i) out[i] = source.one(i) * factor;
        return 0;
    });
}

void divided(float *out, const void *grad, Type type, int64_t n, float divisor) {
    with_type(grad, type, [=](auto source) {
        const Vec::F divisors = Vec::all(divisor);
        int64_t i = 0;
        for (; i + Vec::kWidth <= n; i += Vec::kWidth) {
            source.ahead(i, Vec::kWidth);
            fetch(out + i, Vec::kWidth);
            Vec::store(out + i, Vec::divide(source.many(i), divisors));
        }
        for (; i < n; ++i) out[i] = source.one(i) / divisor;
        return 0;
    });
}

template <bool adds, class Grad>
void adam_step_of(float *out, Grad grad, float factor, float *v, const float *scale, int64_t n, AdamStep step) {
    const Vec::F beta2 = Vec::all(step.beta2), rest2 = Vec::all(step.rest2), eps = Vec::all(step.eps), rate = Vec::all(step.rate);
    const Vec::F factors = Vec::all(factor);
    int64_t i = 0;
    for (; i + Vec::kWidth <= n; i += Vec::kWidth) {
        grad.ahead(i, Vec::kWidth);
        fetch(v + i, Vec::kWidth);
        fetch(out + i, Vec::kWidth);
        const Vec::F g = Vec::multiply(grad.many(i), factors), square = Vec::multiply(Vec::multiply(g, g), rest2);
        const Vec::F moment = Vec::add(Vec::multiply(Vec::load(v + i), beta2), square);
        Vec::store(v + i, moment);
        const Vec::F length = Vec::add(Vec::root(Vec::multiply(moment, Vec::load(scale + i))), eps);
        const Vec::F taken = Vec::divide(Vec::multiply(g, rate), length);
        Vec::store(out + i, adds ? Vec::add(Vec::load(out + i), taken) : taken);
    }
    for (; i < n; ++i) {
        const float g = grad.one(i) * factor, square = g * g * step.rest2;
        v[i] = v[i] * step.beta2 + square;
        const float taken = g * step.rate / (std::sqrt(v[i] * scale[i]) + step.eps);
        out[i] = adds ? out[i] + taken : taken;
    }
}

void adam_step(float *out, bool adds, const void *grad, Type type, float factor, float *v, const float *scale, int64_t n, AdamStep step) {
    with_type(grad, type, [=](auto source) {
        if (adds)
            adam_step_of<true>(out, source, factor, v, scale, n, step);
        else
            adam_step_of<false>(out, source, factor, v, scale, n, step);
        return 0;
    });
}

void rescaled(float *out, const float *mean, const float *v, const float *scale, int64_t n, float floor) {
    const Vec::F floors = Vec::all(floor);
    int64_t i = 0;
    for (; i + Vec::kWidth <= n; i += Vec::kWidth) {
        fetch(v + i, Vec::kWidth);
        const Vec::F length = Vec::add(Vec::root(Vec::multiply(Vec::load(scale + i), Vec::load(v + i))), floors);
        Vec::store(out + i, Vec::multiply(length, Vec::load(mean + i)));
    }
    for (; i < n; ++i) out[i] = (std::sqrt(scale[i] * v[i]) + floor) * mean[i];
}

void momentum_step(float *a, float *m, const float *mean, int64_t n, MomentumStep step) {
    const Vec::F beta1 = Vec::all(step.beta1), rest1 = Vec::all(step.rest1), decay = Vec::all(step.decay);
    const Vec::F lengths = Vec::all(step.length);
    int64_t i = 0;
    for (; i + Vec::kWidth <= n; i += Vec::kWidth) {
        fetch(a + i, Vec::kWidth);
        fetch(m + i, Vec::kWidth);
        fetch(mean + i, Vec::kWidth);
        const Vec::F moment = Vec::add(Vec::multiply(Vec::load(m + i), beta1), Vec::multiply(Vec::load(mean + i), rest1));
        Vec::store(m + i, moment);
        Vec::store(a + i, Vec::subtract(Vec::multiply(Vec::load(a + i), decay), Vec::multiply(moment, lengths)));
    }
    for (; i < n; ++i) {
        m[i] = m[i] * step.beta1 + mean[i] * step.rest1;
        a[i] = a[i] * step.decay - m[i] * step.length;
    }
}

void less(float *to, const float *weights, const float *unsent, int64_t n, float share) {
    const Vec::F shares = Vec::all(share);
    int64_t i = 0;
    for (; i + Vec::kWidth <= n; i += Vec::kWidth) {
        fetch(to + i, Vec::kWidth);
        fetch(weights + i, Vec::kWidth);
        fetch(unsent + i, Vec::kWidth);
        Vec::store(to + i, Vec::subtract(Vec::load(weights + i), Vec::multiply(Vec::load(unsent + i), shares)));
    }
    for (; i < n; ++i) to[i] = weights[i] - unsent[i] * share;
}

// Adds halves until `width` of each block of `block` are left.
void fold(float *x, int64_t n, int64_t block, int64_t width) {
    for (float *row = x; row < x + n; row += block)
        for (int64_t half = block / 2; half >= width; half /= 2)
            for (int64_t i = 0; i < half; i += Vec::kWidth) Vec::store(row + i, Vec::add(Vec::load(row + i), Vec::load(row + half + i)));
}

// The sum of the first 16 of a block.
float folded(const float *row) {
    float eight[8], four[4];
    for (int i = 0; i < 8; ++i) eight[i] = row[i] + row[i + 8];
    for (int i = 0; i < 4; ++i) four[i] = eight[i] + eight[i + 4];
    return (four[0] + four[2]) + (four[1] + four[3]);
}

constexpr int64_t kFolded = 16;

void block_sums(float *x, int64_t n, int64_t block, float *sums) {
    fold(x, n, block, kFolded);
    for (int64_t i = 0; i < n; i += block) *sums++ = folded(x + i);
}

typedef uint32_t Words __attribute__((vector_size(4 * Vec::kWidth)));

void sketch(float *x, int64_t count, float *square, int64_t n, int64_t block, int64_t first, uint32_t key, float *sums, float *squares) {
    Words place, value;
    for (int lane = 0; lane < Vec::kWidth; ++lane) place[lane] = static_cast<uint32_t>(first + lane) * 0x9E3779B1u + key;
    for (int64_t i = 0; i < n; i += Vec::kWidth, place += static_cast<uint32_t>(Vec::kWidth) * 0x9E3779B1u) {
        Words word = (place ^ place >> 16) * 0x85EBCA6Bu;
        word = (word ^ word >> 13) * 0xC2B2AE35u;
        const Vec::F number = Vec::load(x + i);
        Vec::store(square + i, Vec::multiply(number, number));
        std::memcpy(&value, x + i, sizeof value);
        value ^= (word ^ word >> 16) << 31;
        std::memcpy(x + i, &value, sizeof value);
    }
    for (int64_t i = count; i < n; ++i) x[i] = 0.0f;  // the signs of nothing do not count
    block_sums(x, n, block, sums);
    block_sums(square, n, block, squares);
}

constexpr Passes table{add,    select,  select_rows, add_select, max_magnitude, squares,
                       scaled, divided, adam_step,   less,       rescaled, momentum_step, sketch, block_sums};

}  // namespace
}  // namespace sparsync
