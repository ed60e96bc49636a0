// The passes in AVX-512: selecting is one compress instruction, so nothing branches.
#include "kernels.hpp"

#ifdef __AVX512F__
#include <immintrin.h>

namespace sparsync {
namespace {

struct Vec {
    using F = __m512;
    using I = __m512i;
    using M = __mmask16;
    static constexpr int kWidth = 16, kGroup = 1;

    static F load(const float *p) { return _mm512_loadu_ps(p); }
    static F load_bfloat16(const uint16_t *p) {
        const __m256i halves = _mm256_loadu_si256(reinterpret_cast<const __m256i *>(p));
        return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(halves), 16));
    }
    static F load_float16(const uint16_t *p) {
        return _mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i *>(p)));
    }
    static void store(float *p, F value) { _mm512_storeu_ps(p, value); }
    static F add(F a, F b) { return _mm512_add_ps(a, b); }
    static F subtract(F a, F b) { return _mm512_sub_ps(a, b); }
    static F multiply(F a, F b) { return _mm512_mul_ps(a, b); }
    static F divide(F a, F b) { return _mm512_div_ps(a, b); }
    static F root(F a) { return _mm512_sqrt_ps(a); }
    static F all(float value) { return _mm512_set1_ps(value); }
    static I set(uint32_t value) { return _mm512_set1_epi32(static_cast<int>(value)); }
    static I magnitude(F value) { return _mm512_and_si512(_mm512_castps_si512(value), set(kMagnitude)); }
    static I maximum(I a, I b) { return _mm512_max_epu32(a, b); }
    static uint32_t reduce(I value) { return _mm512_reduce_max_epu32(value); }
    static M between(I value, I low, I high) {
        return _mm512_mask_cmple_epu32_mask(_mm512_cmpge_epu32_mask(value, low), value, high);
    }
    static M either(M a, M b) { return static_cast<M>(a | b); }
    static bool any(M mask) { return mask; }
    static int64_t compress(M mask, int32_t position, F value, int32_t *index, float *out) {
        const I lanes = _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
        const I positions = _mm512_add_epi32(lanes, _mm512_set1_epi32(position));
        // Not the form that stores: it is slow on some processors.
        _mm512_storeu_si512(index, _mm512_maskz_compress_epi32(mask, positions));
        _mm512_storeu_ps(out, _mm512_maskz_compress_ps(mask, value));
        return __builtin_popcount(mask);
    }
};

}  // namespace
}  // namespace sparsync

#include "passes.hpp"
#endif

namespace sparsync {

const Passes *passes_avx512() {
#ifdef __AVX512F__
    __builtin_cpu_init();
    if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512bw") &&
        __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("bmi2"))
        return &table;
#endif
    return nullptr;
}

}  // namespace sparsync
