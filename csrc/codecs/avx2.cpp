// The codecs in AVX2: the loops over streams of bits by hand, those over values by the compiler.
#include "codecs.hpp"

#ifdef __AVX2__
#include "positions.hpp"
#include "shares.hpp"
#include "values.hpp"
#endif

namespace sparsync {

const Codecs *codecs_avx2() {
#ifdef __AVX2__
    static constexpr Codecs codecs{encoded_nbytes, encode,       decode,        values_nbytes,
                                   encode_values,  encode_share, reduce_shares, decode_over};
    __builtin_cpu_init();
    if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("bmi") && __builtin_cpu_supports("bmi2") &&
        __builtin_cpu_supports("popcnt"))
        return &codecs;
#endif
    return nullptr;
}

}  // namespace sparsync
