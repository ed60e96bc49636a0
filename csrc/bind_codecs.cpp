// The codecs as Python sees them: addresses and lengths, checked by the caller in sparsync/kernels/codecs.py; the GIL is released.
#include <nanobind/nanobind.h>
#include <nanobind/stl/tuple.h>

#include <cstdint>
#include <tuple>

#include "codecs.hpp"
#include "value_codecs.hpp"

namespace nb = nanobind;
namespace codecs = sparsync::codecs;

namespace {

using Address = uintptr_t;
using Release = nb::call_guard<nb::gil_scoped_release>;

const int32_t *index_at(Address address) { return reinterpret_cast<const int32_t *>(address); }
const float *floats(Address address) { return reinterpret_cast<const float *>(address); }
const uint8_t *bytes(Address address) { return reinterpret_cast<const uint8_t *>(address); }
uint8_t *out_bytes(Address address) { return reinterpret_cast<uint8_t *>(address); }

using Encode = codecs::Reason (*)(const int32_t *, int64_t, int64_t, int, uint8_t *, int64_t);
using Decode = codecs::Reason (*)(const uint8_t *, int64_t, int64_t, int64_t, int32_t *);

// What is wrong with the positions, 0 if nothing; `out` has room for `nbytes`, the bytes of a packet of k positions in the span.
void def_encode(nb::module_ &m, const char *name, Encode encode) {
    m.def(
        name,
        [encode](Address index, int64_t k, int64_t span, int bits, Address out, int64_t nbytes) {
            return static_cast<int>(encode(index_at(index), k, span, bits, out_bytes(out), nbytes));
        },
        Release());
}

// What is wrong with the packet, 0 if nothing; `out` has room for k positions.
void def_decode(nb::module_ &m, const char *name, Decode decode) {
    m.def(
        name,
        [decode](Address packet, int64_t nbytes, int64_t k, int64_t span, Address out) {
            return static_cast<int>(decode(bytes(packet), nbytes, k, span, reinterpret_cast<int32_t *>(out)));
        },
        Release());
}

void bind_positions(nb::module_ &m) {
    m.def(
        "codec_check",
        [](Address index, int64_t k, int64_t span) { return static_cast<int>(codecs::check(index_at(index), k, span)); },
        Release());
    m.def(
        "codec_pack",
        [](Address x, int64_t k, int bits, Address out) { codecs::pack(index_at(x), k, bits, out_bytes(out)); },
        Release());
    m.def(
        "codec_unpack",
        [](Address packet, int64_t k, int bits, Address out) {
            codecs::unpack(bytes(packet), k, bits, reinterpret_cast<int32_t *>(out));
        },
        Release());
    m.def(
        "codec_measure",
        [](Address index, int64_t k, int64_t span) {
            const codecs::Measured seen = codecs::measure(index_at(index), k, span);
            return std::make_tuple(static_cast<int>(seen.reason), seen.delta_nbytes, seen.rice_bits, seen.rice_nbytes);
        },
        Release());
    def_encode(m, "codec_raw_encode", codecs::raw_encode);
    def_encode(m, "codec_packed_encode", codecs::packed_encode);
    def_encode(m, "codec_delta_encode", codecs::delta_encode);
    def_encode(m, "codec_bitmap_encode", codecs::bitmap_encode);
    def_encode(m, "codec_rice_encode", codecs::rice_encode);
    def_encode(m, "codec_elias_fano_encode", codecs::elias_fano_encode);
    def_decode(m, "codec_delta_decode", codecs::delta_decode);
    def_decode(m, "codec_bitmap_decode", codecs::bitmap_decode);
    def_decode(m, "codec_rice_decode", codecs::rice_decode);
    def_decode(m, "codec_elias_fano_decode", codecs::elias_fano_decode);
}

void bind_values(nb::module_ &m) {
    m.def(
        "codec_scaled_encode",
        [](Address value, int64_t k, int bits, Address noise, Address out) {
            codecs::scaled_encode(floats(value), k, bits, floats(noise), out_bytes(out));
        },
        Release());
    m.def(
        "codec_scaled_decode",
        [](Address packet, int64_t k, int bits, Address out) {
            codecs::scaled_decode(bytes(packet), k, bits, reinterpret_cast<float *>(out));
        },
        Release());
    m.def(
        "codec_sign_encode",
        [](Address value, int64_t k, Address out) { codecs::sign_encode(floats(value), k, out_bytes(out)); },
        Release());
    m.def(
        "codec_sign_decode",
        [](Address packet, int64_t k, Address out) {
            codecs::sign_decode(bytes(packet), k, reinterpret_cast<float *>(out));
        },
        Release());
}

}  // namespace

void bind_codecs(nb::module_ &m) {
    bind_positions(m);
    bind_values(m);
}
