// The passes for any machine: vectors of four by the compiler's extension, which become SSE2, NEON or plain instructions.
#include <cmath>
#include <cstring>

#include "kernels.hpp"

namespace sparsync {
namespace {

float half_to_float(uint16_t half);

struct Vec {
    typedef float F __attribute__((vector_size(16)));
    typedef int32_t I __attribute__((vector_size(16)));
    typedef I M;
    static constexpr int kWidth = 4, kGroup = 4;

    static F load(const float *p) {
        F value;
        std::memcpy(&value, p, sizeof value);
        return value;
    }
    static F load_bfloat16(const uint16_t *p) {
        const I bits = {p[0] << 16, p[1] << 16, p[2] << 16, p[3] << 16};
        return reinterpret_cast<F>(bits);
    }
    static F load_float16(const uint16_t *p) {
        return F{half_to_float(p[0]), half_to_float(p[1]), half_to_float(p[2]), half_to_float(p[3])};
    }
    static void store(float *p, F value) { std::memcpy(p, &value, sizeof value); }
    static F add(F a, F b) { return a + b; }
    static F subtract(F a, F b) { return a - b; }
    static F multiply(F a, F b) { return a * b; }
    static F divide(F a, F b) { return a / b; }
    static F root(F a) { return F{std::sqrt(a[0]), std::sqrt(a[1]), std::sqrt(a[2]), std::sqrt(a[3])}; }
    static F all(float value) { return F{value, value, value, value}; }
    static I set(uint32_t value) {
        const int32_t lane = static_cast<int32_t>(value);
        return I{lane, lane, lane, lane};
    }
    static I magnitude(F value) { return reinterpret_cast<I>(value) & set(kMagnitude); }
    static I maximum(I a, I b) { return a > b ? a : b; }  // of magnitudes, which have no sign bit
    static uint32_t reduce(I value) {
        int32_t most = 0;
        for (int lane = 0; lane < kWidth; ++lane) most = value[lane] > most ? value[lane] : most;
        return static_cast<uint32_t>(most);
    }
    static M between(I value, I low, I high) { return (value >= low) & (value <= high); }
    static M either(M a, M b) { return a | b; }
    static bool any(M mask) {
        typedef int64_t Pair __attribute__((vector_size(16)));
        const Pair pair = reinterpret_cast<Pair>(mask);
        return pair[0] | pair[1];
    }
    static int64_t compress(M mask, int32_t position, F value, int32_t *index, float *out) {
        int64_t count = 0;
        for (int lane = 0; lane < kWidth; ++lane) {
            index[count] = position + lane;
            out[count] = value[lane];
            count -= mask[lane];
        }
        return count;
    }
};

}  // namespace
}  // namespace sparsync

#include "passes.hpp"

namespace sparsync {
namespace {

float half_to_float(uint16_t half) { return Float16{&half}.one(0); }

}  // namespace

const Passes *passes_scalar() {
    return &table;
}

}  // namespace sparsync
