// Several sparse vectors in one call, as Python sees it: what small buckets would otherwise spend on calls. Each function does what a
// loop over others does, in sparsync/wire.py or sparsync/kernels/operations.py, with the same results. For whatever it does not take, also for
// packets and positions that are to be refused, it returns NotImplemented before it writes anything that is seen, and the loop says why.
#include <nanobind/nanobind.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <cstdint>
#include <vector>

#include "bindings.hpp"
#include "kernels/level.hpp"
#include "kernels/packets.hpp"
#include "kernels/sparse.hpp"

namespace nb = nanobind;
using namespace sparsync;

namespace {

constexpr int64_t kMostElements = INT32_MAX;

// A sparsync.core.Sparse of int32 and float32; `taken` is false for any other.
struct Part {
    nb::object index, value;
    Tensor at, content;
    int64_t length;

    explicit Part(nb::handle part)
        : index(part.attr("index")), value(part.attr("value")), at(read(index)), content(read(value)),
          length(nb::cast<int64_t>(part.attr("length"))) {}

    bool taken() const {
        return at.is(Element::int32) && content.is(Element::float32) && at.length == content.length && at.length <= length &&
               length <= kMostElements;
    }
};

std::vector<Part> parts_of(nb::handle sequence) {
    std::vector<Part> parts;
    for (const nb::handle each : nb::borrow<nb::sequence>(sequence)) parts.emplace_back(each);
    return parts;
}

bool all_taken(const std::vector<Part> &parts) {
    return std::all_of(parts.begin(), parts.end(), [](const Part &part) { return part.taken(); });
}

// The rows that places count, one region for each part; none for None.
struct Regions {
    std::vector<Read> regions;
    bool given;

    explicit Regions(nb::handle sequence) : given(!sequence.is_none()) {
        if (!given) return;
        for (const nb::handle each : nb::borrow<nb::sequence>(sequence)) regions.emplace_back(each);
    }

    bool taken(size_t count) const {
        return !given || (regions.size() == count && std::all_of(regions.begin(), regions.end(), [](const Read &region) {
                              return region.taken() && region.rows.row >= 1 && region.rows.length >= 0 &&
                                     region.rows.length <= kMostElements && region.rows.row <= kMostElements &&
                                     region.rows.count() <= region.starts.length;
                          }));
    }
};

nb::object encode_packets(nb::handle sequence, int64_t bits, int64_t divisor, nb::handle rows, int64_t n) {
    const std::vector<Part> parts = parts_of(sequence);
    const Regions places(rows);
    if (!are_value_bits(bits) || divisor < 1 || !all_taken(parts) || !places.taken(parts.size())) return not_taken();
    const Codecs &codecs = *level().codecs;
    std::vector<PacketForm> forms;
    std::vector<Made> packets, errors, positions;
    int64_t longest = 0;
    for (const Part &part : parts) {
        const int64_t k = part.at.length;
        forms.push_back(packet_form(codecs, k, part.length, static_cast<int>(bits)));
        packets.push_back(make(forms.back().nbytes, Element::uint8));
        errors.push_back(make(k, Element::float32));
        if (places.given) positions.push_back(make(k, Element::int32));
        longest = std::max(longest, k);
    }
    const bool fine = unlocked([&] {
        std::vector<float> shares(divisor == 1 ? 0 : static_cast<size_t>(longest)), received(static_cast<size_t>(longest));
        for (size_t i = 0; i < parts.size(); ++i) {
            const Part &part = parts[i];
            const int64_t k = part.at.length;
            const float *value = part.content.as<float>(), *sent = value;
            if (divisor != 1) {
                std::transform(value, value + k, shares.data(), [&](float each) { return each / static_cast<float>(divisor); });
                sent = shares.data();
            }
            if (!encode_packet(codecs, forms[i], part.at.as<int32_t>(), sent, packets[i].as<uint8_t>())) return false;
            decode_packet_values(codecs, forms[i], packets[i].as<uint8_t>(), received.data());
            lacking(value, received.data(), k, divisor, errors[i].as<float>());
            if (places.given && !locate(places.regions[i].rows, part.at.as<int32_t>(), k, positions[i].as<int32_t>())) return false;
        }
        return true;
    });
    if (!fine) return not_taken();
    nb::list sent, dropped;
    for (size_t i = 0; i < parts.size(); ++i) {
        sent.append(packets[i].object);
        dropped.append(places.given ? sparse(positions[i].object, errors[i].object, n)
                                    : sparse(parts[i].index, errors[i].object, parts[i].length));
    }
    return nb::make_tuple(sent, dropped);
}

nb::object decode_packets(nb::handle sequence, const std::vector<int64_t> &counts, const std::vector<int64_t> &lengths, int64_t bits,
                          nb::handle rows, int64_t n) {
    std::vector<Tensor> packets;
    std::vector<nb::object> held;  // whoever drops the sequence meanwhile
    for (const nb::handle each : nb::borrow<nb::sequence>(sequence)) {
        packets.push_back(read(each));
        held.push_back(nb::borrow(each));
        if (!packets.back().is(Element::uint8)) return not_taken();
    }
    const Regions places(rows);
    if (!are_value_bits(bits) || counts.size() != packets.size() || lengths.size() != packets.size() ||
        !places.taken(packets.size()))
        return not_taken();
    const Codecs &codecs = *level().codecs;
    std::vector<PacketForm> forms;
    std::vector<Made> index, value;
    for (size_t i = 0; i < packets.size(); ++i) {
        if (counts[i] < 0 || counts[i] > lengths[i] || lengths[i] > kMostElements) return not_taken();
        forms.push_back(packet_form(codecs, counts[i], lengths[i], static_cast<int>(bits)));
        if (packets[i].length != forms.back().nbytes) return not_taken();
        index.push_back(make(counts[i], Element::int32));
        value.push_back(make(counts[i], Element::float32));
    }
    const bool fine = unlocked([&] {
        for (size_t i = 0; i < packets.size(); ++i) {
            int32_t *at = index[i].as<int32_t>();
            if (!decode_packet(codecs, forms[i], packets[i].as<uint8_t>(), packets[i].length, at, value[i].as<float>())) return false;
            if (places.given && !locate(places.regions[i].rows, at, counts[i], at)) return false;
        }
        return true;
    });
    if (!fine) return not_taken();
    nb::list found;
    for (size_t i = 0; i < packets.size(); ++i)
        found.append(sparse(index[i].object, value[i].object, places.given ? n : lengths[i]));
    return std::move(found);
}

nb::object scatter_add_each_(nb::handle out, nb::handle sequence) {
    const Tensor x = read(out);
    const std::vector<Part> parts = parts_of(sequence);
    if (!x.is(Element::float32) || !all_taken(parts)) return not_taken();
    for (const Part &part : parts) {
        const int32_t *index = part.at.as<int32_t>();
        for (int64_t i = 0; i < part.at.length; ++i)
            if (index[i] < 0 || index[i] >= x.length) return not_taken();
    }
    unlocked([&] {
        for (const Part &part : parts)
            scatter_add(x.as<float>(), x.length, part.at.as<int32_t>(), part.content.as<float>(), part.at.length);
    });
    return nb::none();
}

nb::object finite_each(nb::handle sequence, int64_t times) {
    std::vector<Tensor> values;
    std::vector<nb::object> held;
    for (const nb::handle each : nb::borrow<nb::sequence>(sequence)) {
        values.push_back(read(each));
        held.push_back(nb::borrow(each));
        if (!values.back().is(Element::float32)) return not_taken();
    }
    return nb::bool_(unlocked([&] {
        return std::all_of(values.begin(), values.end(), [&](const Tensor &each) {
            return finite_times(each.as<float>(), each.length, static_cast<float>(times));
        });
    }));
}

}  // namespace

void bind_packets(nb::module_ &m) {
    m.def("encode_packets", encode_packets, nb::arg(), nb::arg(), nb::arg(), nb::arg().none(), nb::arg());
    m.def("decode_packets", decode_packets, nb::arg(), nb::arg(), nb::arg(), nb::arg(), nb::arg().none(), nb::arg());
    m.def("scatter_add_each_", scatter_add_each_);
    m.def("finite_each", finite_each);
}
