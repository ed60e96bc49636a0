// The codecs as Python sees them: checked tensors in, new tensors out, as in bind_kernels.cpp. The messages of errors are those of
// sparsync/kernels/codec_reference.py.
#include <nanobind/nanobind.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>

#include <cstdint>
#include <stdexcept>
#include <string>
#include <vector>

#include "bindings.hpp"
#include "kernels/level.hpp"
#include "kernels/packets.hpp"
#include "tensors.hpp"

namespace nb = nanobind;
using namespace sparsync;

void sparsync::expect_value_bits(int64_t bits) {
    if (!is_rounded(bits))
        throw nb::value_error(("values are rounded to 8, 4, 3 or 1 bits, or five to a byte (" + std::to_string(ternary) + "), got " +
                               std::to_string(bits)).c_str());
}

void sparsync::expect_nbytes(int64_t nbytes, int64_t k, int bits) {
    const int64_t wanted = level().codecs->values_nbytes(k, bits);
    if (k < 0 || nbytes != wanted)
        throw std::runtime_error(std::to_string(k) + " values of " + (bits == ternary ? "8/5" : std::to_string(bits)) + " bits take " +
                                 std::to_string(wanted) + " bytes with their scales, the packet has " + std::to_string(nbytes) +
                                 "; sender and receiver must agree on codec and count");
}

void sparsync::expect_ranks(int64_t P) {
    if (P < 1) throw nb::value_error(("a mean is over 1 rank or more, got " + std::to_string(P)).c_str());
}

namespace {

constexpr int64_t kMaxSpan = INT32_MAX;

Positions codec_of(const std::string &name) {
    if (name == "packed") return Positions::packed;
    if (name == "bitmap") return Positions::bitmap;
    if (name == "elias_fano") return Positions::elias_fano;
    throw nb::value_error(("a codec of positions is one of packed, bitmap, elias_fano, got '" + name + "'").c_str());
}

void expect_span(int64_t span) {
    if (span < 0 || span > kMaxSpan)
        throw nb::value_error(("positions are encoded inside spans of at most " + std::to_string(kMaxSpan) +
                               " elements, got " + std::to_string(span) + "; use smaller buckets").c_str());
}

// Raises ValueError for the first of k positions that does not ascend inside the span.
template <class Index>
[[noreturn]] void refuse(const Index *index, int64_t k, int64_t span) {
    int64_t i = 0;
    while (i < k && index[i] >= 0 && index[i] < span && (i == 0 || index[i] > index[i - 1])) ++i;
    throw nb::value_error(("positions to encode must ascend inside [0, " + std::to_string(span - 1) + "], each once, got " +
                           std::to_string(index[i]) + " as number " + std::to_string(i)).c_str());
}

[[noreturn]] void refuse_packet(Reason reason, int64_t k, int64_t span, int64_t nbytes) {
    const std::string count = std::to_string(k);
    const std::string what = reason == wrong_size    ? "its " + std::to_string(nbytes) + " bytes are not what " + count + " positions take"
                             : reason == wrong_count ? "it does not hold " + count + " positions"
                             : reason == wrong_order ? "its " + count + " positions do not ascend"
                                                     : "it has positions outside [0, " + std::to_string(span - 1) + "]";
    throw std::runtime_error("a packet of positions cannot be decoded: " + what +
                             "; sender and receiver must agree on codec, span and count");
}

// Positions as int32: those of 64 bits copied, where one that does not fit becomes -1, which no encoder takes.
class Narrow {
  public:
    explicit Narrow(const Tensor &index) : index_(index) {
        if (index.element == Element::int32) return;
        copy_.reserve(static_cast<size_t>(index.length));
        for (int64_t i = 0; i < index.length; ++i) {
            const int64_t position = index.as<int64_t>()[i];
            copy_.push_back(position < 0 || position > kMaxSpan ? -1 : static_cast<int32_t>(position));
        }
    }
    const int32_t *data() const { return index_.element == Element::int32 ? index_.as<int32_t>() : copy_.data(); }

    [[noreturn]] void refuse(int64_t span) const {
        if (index_.element == Element::int32) ::refuse(index_.as<int32_t>(), index_.length, span);
        ::refuse(index_.as<int64_t>(), index_.length, span);
    }

  private:
    const Tensor index_;
    std::vector<int32_t> copy_;
};

void bind_positions(nb::module_ &m) {
    m.def("encode_positions", [](const std::string &codec, nb::handle index, int64_t span) {
        const Positions how = codec_of(codec);
        expect_span(span);
        const Tensor positions = read(index);
        if (!positions.is_index()) return not_taken();
        const int64_t k = positions.length;
        const Narrow narrow(positions);
        if (k > span) narrow.refuse(span);
        const Made packet = make(level().codecs->nbytes(how, k, span), Element::uint8);
        Reason reason;
        {
            const nb::gil_scoped_release release;
            reason = level().codecs->encode(how, narrow.data(), k, span, packet.as<uint8_t>());
        }
        if (reason != fine) narrow.refuse(span);
        return packet.object;
    });
    m.def("decode_positions", [](const std::string &codec, nb::handle packet, int64_t k, int64_t span) {
        const Positions how = codec_of(codec);
        const Tensor bytes = read(packet);
        if (!bytes.is(Element::uint8)) return not_taken();
        if (k < 0 || k > span || span > kMaxSpan) refuse_packet(wrong_count, k, span, bytes.length);
        const Made index = make(k, Element::int32);
        Reason reason;
        {
            const nb::gil_scoped_release release;
            reason = level().codecs->decode(how, bytes.as<uint8_t>(), bytes.length, k, span, index.as<int32_t>());
        }
        if (reason != fine) refuse_packet(reason, k, span, bytes.length);
        return index.object;
    });
}

void bind_values(nb::module_ &m) {
    m.def("values_encode", [](nb::handle value, int64_t bits) {
        const Tensor content = read(value);
        if (!content.is(Element::float32)) return not_taken();
        expect_value_bits(bits);
        const Made packet = make(level().codecs->values_nbytes(content.length, static_cast<int>(bits)), Element::uint8);
        {
            const nb::gil_scoped_release release;
            level().codecs->encode_values(content.as<float>(), content.length, static_cast<int>(bits), packet.as<uint8_t>());
        }
        return packet.object;
    });
    m.def("values_decode", [](nb::handle packet, int64_t k, int64_t bits) {
        const Tensor bytes = read(packet);
        if (!bytes.is(Element::uint8)) return not_taken();
        expect_value_bits(bits);
        expect_nbytes(bytes.length, k, static_cast<int>(bits));
        const Made value = make(k, Element::float32);
        {
            const nb::gil_scoped_release release;
            level().codecs->decode_over(bytes.as<uint8_t>(), 0, k, k, static_cast<int>(bits), value.as<float>(), nullptr);
        }
        return value.object;
    });
}

// Adds up what came from other ranks, see reduce_shares in shares.hpp.
nb::object reduce_shares_in(nb::handle value, nb::handle packets, int64_t bits, int64_t P, int64_t bits_down, nb::handle skip) {
    if (!skip.is_none()) return not_taken();  // a flag on a device
    const Tensor content = read(value);
    if (!content.is(Element::float32)) return not_taken();
    expect_value_bits(bits);
    expect_value_bits(bits_down);
    expect_ranks(P);
    std::vector<const uint8_t *> arrived;
    std::vector<nb::object> held;  // whoever drops the sequence meanwhile
    for (const nb::handle each : nb::borrow<nb::sequence>(packets)) {
        const Tensor packet = read(each);
        if (!packet.is(Element::uint8)) return not_taken();
        expect_nbytes(packet.length, content.length, static_cast<int>(bits));
        arrived.push_back(packet.as<uint8_t>());
        held.push_back(nb::borrow(each));
    }
    const int down = static_cast<int>(bits_down);
    const Made packet = make(level().codecs->values_nbytes(content.length, down), Element::uint8);
    {
        const nb::gil_scoped_release release;
        level().codecs->reduce_shares(content.as<float>(), content.length, arrived.data(), static_cast<int64_t>(arrived.size()),
                                      static_cast<int>(bits), P, down, packet.as<uint8_t>());
    }
    return packet.object;
}

}  // namespace

void bind_codecs(nb::module_ &m) {
    bind_positions(m);
    bind_values(m);
    m.def("reduce_shares_", reduce_shares_in, nb::arg(), nb::arg(), nb::arg(), nb::arg(), nb::arg(), nb::arg().none());
}
