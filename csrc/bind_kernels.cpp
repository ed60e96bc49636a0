// The kernels as Python sees them: `sparsync.kernels.dispatch` registers these functions as they are.
//
// Every function checks the tensors it is given. For a type, a device or a shape that it does not take it returns NotImplemented, and
// the caller asks the next implementation; numbers that would lead outside of the memory raise ValueError or IndexError. The GIL is
// released while a kernel runs. What is found is collected in a buffer of the calling thread, then copied to tensors of just its length.
#include <nanobind/nanobind.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <deque>
#include <limits>
#include <optional>
#include <string>
#include <vector>

#include "bindings.hpp"
#include "kernels/core.hpp"
#include "kernels/level.hpp"
#include "kernels/move.hpp"
#include "kernels/sparse.hpp"
#include "tensors.hpp"

namespace nb = nanobind;
using namespace sparsync;

namespace {

PyObject *sparse_class = nullptr;  // sparsync.core.Sparse, held as long as the process lives

}  // namespace

nb::object sparsync::sparse(const nb::object &index, const nb::object &value, int64_t length) {
    return nb::handle(sparse_class)(index, value, length);
}

namespace {

Found &buffer() {
    thread_local Found found;
    found.count = 0;
    return found;
}

template <class Index>
nb::object indices_of(Found &found, Element element) {
    const Made index = make(found.count, element);
    std::copy(found.index(), found.index() + found.count, index.as<Index>());
    return index.object;
}

nb::object sparse_of(Found &found, int64_t length) {
    const nb::object index = indices_of<int32_t>(found, Element::int32);
    const Made value = make(found.count, Element::float32);
    std::copy(found.value(), found.value() + found.count, value.as<float>());
    found.release();
    return sparse(index, value.object, length);
}

[[noreturn]] void refuse_positions(int64_t n, int64_t low, int64_t high) {
    const std::string count = std::to_string(n);
    throw nb::index_error(("positions must be in [0, " + count + ") for " + count + " elements, got " + std::to_string(low) +
                           " to " + std::to_string(high)).c_str());
}

// k, or n if that is less: so many of n elements are to be selected.
int64_t at_most(int64_t k, int64_t n) {
    if (k < 0) throw nb::value_error(("k must be 0 or more, got " + std::to_string(k)).c_str());
    return std::min(k, n);
}

// The bits of the float32 nearest to the magnitude, 0 for a negative one; not for NaN.
uint32_t magnitude_bits(double magnitude) {
    const float nearest = magnitude > 0.0 ? static_cast<float>(magnitude) : 0.0f;
    uint32_t bits;
    std::memcpy(&bits, &nearest, sizeof bits);
    return bits;
}

Top wanted(int64_t k, int32_t lowest, std::optional<double> bound) {
    if (!bound || std::isnan(*bound)) return {k, lowest, false};
    return {k, lowest, true, static_cast<int32_t>(std::min(magnitude_bits(*bound), kInfinity))};
}

nb::object select_top(nb::handle x, int64_t k, nb::handle skip, int32_t lowest, std::optional<double> bound) {
    const Tensor vector = read(x);
    if (!vector.is(Element::float32)) return not_taken();
    const int64_t n = vector.length, count = at_most(k, n);
    const Span span = skip.is_none() ? Span{n, n} : span_in(skip, n);
    Found &found = buffer();
    unlocked([&] {
        top(*level().passes, vector.as<float>(), {{0, span.start}, {span.stop, n}}, wanted(count, lowest, bound), found);
    });
    return sparse_of(found, n);
}

nb::object accumulate_top(nb::handle residual, nb::handle grad, int64_t k, nb::handle out, nb::handle skip, int32_t lowest,
                          std::optional<double> bound) {
    const Tensor before = read(residual), added = read(grad), sum = read(out);
    if (!before.is(Element::float32) || !added.is_gradient() || !sum.is(Element::float32)) return not_taken();
    const int64_t n = sum.length;
    expect_equal(before.length, n, "residual and result");
    expect_equal(added.length, n, "gradient and result");
    const int64_t count = at_most(k, n);
    const Span span = skip.is_none() ? Span{n, n} : span_in(skip, n);
    Found &found = buffer();
    const uint32_t greatest = unlocked([&] {
        return add_top(*level().passes, before.as<float>(), gradient(added), sum.as<float>(), n, span,
                       wanted(count, lowest, bound), found);
    });
    return nb::make_tuple(sparse_of(found, n), greatest < kInfinity);
}

// The magnitudes from `threshold` on, without zeros; none for NaN.
Range from_threshold(double threshold) {
    return std::isnan(threshold) ? kNone : Range{std::max(uint32_t{1}, magnitude_bits(threshold)), kMagnitude};
}

nb::object accumulate_select(nb::handle residual, nb::handle grad, double threshold, nb::handle out, nb::handle span) {
    const Tensor before = read(residual), added = read(grad), sum = read(out);
    if (!before.is(Element::float32) || !added.is_gradient() || !sum.is(Element::float32)) return not_taken();
    const int64_t n = sum.length;
    expect_equal(before.length, n, "residual and result");
    expect_equal(added.length, n, "gradient and result");
    const Span searched = span_in(span, n);
    Found &found = buffer();
    const uint32_t greatest = unlocked([&] {
        return add_select(*level().passes, before.as<float>(), gradient(added), sum.as<float>(), n, searched,
                          from_threshold(threshold), found);
    });
    return nb::make_tuple(sparse_of(found, n), greatest < kInfinity);
}

nb::object top_of(nb::handle x, nb::handle rows, int64_t k, std::optional<double> bound) {
    const Tensor vector = read(x);
    const Read region(rows);
    if (!vector.is(Element::float32) || !region.taken()) return not_taken();
    region.expect_enough();
    region.expect_inside(vector.length);
    const int64_t count = at_most(k, region.rows.length);
    Found &found = buffer();
    unlocked([&] { top_of_rows(*level().passes, vector.as<float>(), region.rows, wanted(count, 0, bound), found); });
    return sparse_of(found, region.rows.length);
}

nb::object accumulate_top_of(nb::handle residual, nb::handle grad, const std::vector<nb::object> &regions,
                             const std::vector<int64_t> &counts, nb::handle out, const std::vector<std::optional<double>> &bounds) {
    const Tensor before = read(residual), added = read(grad), sum = read(out);
    if (!before.is(Element::float32) || !added.is_gradient() || !sum.is(Element::float32)) return not_taken();
    const int64_t n = sum.length;
    expect_equal(before.length, n, "residual and result");
    expect_equal(added.length, n, "gradient and result");
    expect_equal(static_cast<int64_t>(counts.size()), static_cast<int64_t>(regions.size()), "regions and counts");
    expect_equal(static_cast<int64_t>(bounds.size()), static_cast<int64_t>(regions.size()), "regions and bounds");
    thread_local std::deque<Found> buffers;
    while (buffers.size() < regions.size()) buffers.emplace_back();
    std::vector<Read> held;  // the tensors, whoever drops the sequence meanwhile
    std::vector<Wanted> searched;
    for (size_t i = 0; i < regions.size(); ++i) {
        const Read &region = held.emplace_back(regions[i]);
        if (!region.taken()) return not_taken();
        region.expect_enough();
        region.expect_inside(n);
        searched.push_back({region.rows, wanted(at_most(counts[i], region.rows.length), 0, bounds[i]), &buffers[i]});
    }
    const uint32_t greatest = unlocked([&] {
        return add_top_of_rows(*level().passes, before.as<float>(), gradient(added), sum.as<float>(), n, searched);
    });
    nb::list found;
    for (const Wanted &each : searched) found.append(sparse_of(*each.found, each.rows.length));
    return nb::make_tuple(found, greatest < kInfinity);
}

// Positions, and the vector that they point into.
struct Indexed {
    Tensor x, index;

    Indexed(nb::handle vector, nb::handle positions) : x(read(vector)), index(read(positions)) {}

    bool taken() const { return x.is(Element::float32) && index.is_index(); }

    // work(positions) for positions of either width, without the GIL. Raises IndexError where it returns false.
    template <class Work>
    void run(Work work) const {
        const bool wide = index.element == Element::int64;
        if (unlocked([&] { return wide ? work(index.as<int64_t>()) : work(index.as<int32_t>()); })) return;
        const auto [low, high] = wide ? ends<int64_t>() : ends<int32_t>();
        refuse_positions(x.length, low, high);
    }

  private:
    template <class Index>
    std::pair<int64_t, int64_t> ends() const {
        const auto [low, high] = std::minmax_element(index.as<Index>(), index.as<Index>() + index.length);
        return {*low, *high};
    }
};

// The parts of a sequence of Sparse, and the sum of their lengths; whether they are taken.
struct Parts {
    std::vector<SparseView> views;
    std::vector<nb::object> held;  // the tensors, whoever drops the sequence meanwhile
    int64_t total = 0, length = 0;
    bool taken = true;

    explicit Parts(nb::handle sequence) {
        for (const nb::handle part : nb::borrow<nb::sequence>(sequence)) add(part);
    }

    void expect_some() const {
        if (views.empty()) throw nb::value_error("there must be at least one sparse vector, got none");
    }

  private:
    void add(nb::handle part) {
        const nb::object index = part.attr("index"), value = part.attr("value");
        const Tensor at = read(index), content = read(value);
        taken = taken && at.is(Element::int32) && content.is(Element::float32);
        if (taken) expect_equal(at.length, content.length, "positions and values");
        if (views.empty()) length = nb::cast<int64_t>(part.attr("length"));
        views.push_back({at.as<int32_t>(), content.as<float>(), at.length});
        total += at.length;
        held.push_back(index);
        held.push_back(value);
    }
};

nb::object merged(nb::handle sequence, bool add) {
    const Parts parts(sequence);
    parts.expect_some();
    if (!parts.taken) return not_taken();
    if (parts.total >= int64_t{1} << 31) return not_taken();
    const Made index = make(parts.total, Element::int32), value = make(parts.total, Element::float32);
    const int64_t count = unlocked([&] {
        merge(parts.views, index.as<int32_t>(), value.as<float>());
        return add ? add_equal(index.as<int32_t>(), value.as<float>(), parts.total) : parts.total;
    });
    if (count == parts.total) return sparse(index.object, value.object, parts.length);
    const nb::slice first{nb::none(), nb::int_(count), nb::none()};
    return sparse(index.object[first], value.object[first], parts.length);
}

nb::object split_at(nb::handle part, nb::handle regions) {
    const Parts parts(nb::make_tuple(part));
    if (!parts.taken) return not_taken();
    const SparseView whole = parts.views[0];
    nb::list result;
    const int32_t *from = whole.index, *end = whole.index + whole.count;
    for (const nb::handle region : nb::borrow<nb::sequence>(regions)) {
        const auto start = nb::cast<int64_t>(region.attr("start")), stop = nb::cast<int64_t>(region.attr("stop"));
        const int32_t *until = std::lower_bound(from, end, stop);
        const Made index = make(until - from, Element::int32), value = make(until - from, Element::float32);
        std::transform(from, until, index.as<int32_t>(),
                       [start](int32_t position) { return static_cast<int32_t>(position - start); });
        std::copy(whole.value + (from - whole.index), whole.value + (until - whole.index), value.as<float>());
        result.append(sparse(index.object, value.object, stop - start));
        from = until;
    }
    return std::move(result);
}

void bind_passes(nb::module_ &m) {
    m.def("all_finite", [](nb::handle x) {
        const Tensor vector = read(x);
        if (!vector.is(Element::float32)) return not_taken();
        const uint32_t greatest = unlocked([&] { return level().passes->max_magnitude(vector.as<float>(), vector.length); });
        return nb::object(nb::bool_(greatest < kInfinity));
    });
    m.def("accumulate", [](nb::handle residual, nb::handle grad, nb::handle out) {
        const Tensor before = read(residual), added = read(grad), sum = read(out);
        if (!before.is(Element::float32) || !added.is_gradient() || !sum.is(Element::float32)) return not_taken();
        expect_equal(before.length, sum.length, "residual and result");
        expect_equal(added.length, sum.length, "gradient and result");
        const Gradient typed = gradient(added);
        const uint32_t greatest = unlocked([&] {
            return level().passes->add(before.as<float>(), typed.data, typed.type, sum.as<float>(), sum.length);
        });
        return nb::object(nb::bool_(greatest < kInfinity));
    });
    m.def("divide_to_", [](nb::handle out, nb::handle x, int64_t divisor) {
        const Tensor to = read(out), from = read(x);
        if (!to.is(Element::float32) || !from.is_gradient()) return not_taken();
        expect_equal(from.length, to.length, "vectors");
        const Gradient typed = gradient(from);
        unlocked([&] {
            level().passes->divided(to.as<float>(), typed.data, typed.type, to.length, static_cast<float>(divisor));
        });
        return nb::object(nb::none());
    });
}

void bind_selection(nb::module_ &m) {
    m.def("select_ge", [](nb::handle x, double threshold) {
        const Tensor vector = read(x);
        if (!vector.is(Element::float32)) return not_taken();
        Found &found = buffer();
        unlocked([&] {
            select(*level().passes, vector.as<float>(), vector.length, from_threshold(threshold), found);
        });
        return sparse_of(found, vector.length);
    });
    m.def("top_k", [](nb::handle x, int64_t k, std::optional<double> bound) {
        return select_top(x, k, nb::none(), 0, bound);
    }, nb::arg(), nb::arg(), nb::arg().none());
    m.def("top_k_nonzero", [](nb::handle x, int64_t k, nb::handle skip, std::optional<double> bound) {
        return select_top(x, k, skip, 1, bound);
    }, nb::arg(), nb::arg(), nb::arg().none(), nb::arg().none());
    m.def("accumulate_top_k", [](nb::handle residual, nb::handle grad, int64_t k, nb::handle out, std::optional<double> bound) {
        return accumulate_top(residual, grad, k, out, nb::none(), 0, bound);
    }, nb::arg(), nb::arg(), nb::arg(), nb::arg(), nb::arg().none());
    m.def("accumulate_top_k_nonzero",
          [](nb::handle residual, nb::handle grad, int64_t k, nb::handle out, nb::handle skip, std::optional<double> bound) {
              return accumulate_top(residual, grad, k, out, skip, 1, bound);
          }, nb::arg(), nb::arg(), nb::arg(), nb::arg(), nb::arg().none(), nb::arg().none());
    m.def("top_k_of_rows", top_of, nb::arg(), nb::arg(), nb::arg(), nb::arg().none());
    m.def("accumulate_select_ge", accumulate_select);
    m.def("accumulate_top_k_of_rows", accumulate_top_of);
    m.def("smallest_magnitude", [](nb::handle x) {
        const Tensor vector = read(x);
        if (!vector.is(Element::float32)) return not_taken();
        const uint32_t least = unlocked([&] { return smallest_magnitude(vector.as<float>(), vector.length); });
        float magnitude;
        std::memcpy(&magnitude, &least, sizeof magnitude);
        return nb::object(nb::float_(static_cast<double>(magnitude)));
    });
}

void bind_positions(nb::module_ &m) {
    m.def("scatter_add_", [](nb::handle out, nb::handle part) {
        const nb::object index = part.attr("index"), value = part.attr("value");
        const Indexed at(out, index);
        const Tensor content = read(value);
        if (!at.taken() || !content.is(Element::float32)) return not_taken();
        expect_equal(at.index.length, content.length, "positions and values");
        at.run([&](const auto *place) {
            return scatter_add(at.x.as<float>(), at.x.length, place, content.as<float>(), content.length);
        });
        return nb::object(nb::none());
    });
    m.def("clear_", [](nb::handle x, nb::handle index) {
        const Indexed at(x, index);
        if (!at.taken()) return not_taken();
        at.run([&](const auto *place) { return clear(at.x.as<float>(), at.x.length, place, at.index.length); });
        return nb::object(nb::none());
    });
    m.def("put_", [](nb::handle x, nb::handle index, nb::handle value) {
        const Indexed at(x, index);
        const Tensor content = read(value);
        if (!at.taken() || !content.is(Element::float32)) return not_taken();
        expect_equal(at.index.length, content.length, "positions and values");
        at.run([&](const auto *place) {
            return put(at.x.as<float>(), at.x.length, place, content.as<float>(), content.length);
        });
        return nb::object(nb::none());
    });
    m.def("gather", [](nb::handle x, nb::handle index) {
        const Indexed at(x, index);
        if (!at.taken()) return not_taken();
        const Made value = make(at.index.length, Element::float32);
        at.run([&](const auto *place) {
            return gather(at.x.as<float>(), at.x.length, place, value.as<float>(), at.index.length);
        });
        return value.object;
    });
}

// Raises IndexError where a position is outside of [0, n); whether positions ascend in each of the parts.
bool expect_ascending(const Parts &parts, int64_t n) {
    bool ascend = true;
    for (const SparseView &part : parts.views) {
        int64_t low = 0, high = -1;
        for (int64_t i = 0; i < part.count; ++i) {
            low = std::min<int64_t>(low, part.index[i]);
            high = std::max<int64_t>(high, part.index[i]);
        }
        if (low < 0 || high >= n) {
            const auto [least, most] = std::minmax_element(part.index, part.index + part.count);
            refuse_positions(n, *least, *most);
        }
        for (int64_t i = 1; i < part.count; ++i) ascend &= part.index[i] > part.index[i - 1];
    }
    return ascend;
}

nb::object move_put_into(nb::handle to, nb::handle source, nb::handle kept, nb::handle written, nb::handle skip) {
    const Tensor target = read(to), from = read(source);
    const Parts stays(kept), comes(written);
    if (!target.is(Element::float32) || !from.is(Element::float32) || !stays.taken || !comes.taken) return not_taken();
    expect_equal(target.length, from.length, "what is moved and its new place");
    const bool ascend = expect_ascending(stays, from.length) & expect_ascending(comes, from.length);
    if (!ascend) return not_taken();
    const auto lies_in = [&](const SparseView &part) {
        return part.count && part.value < from.as<float>() + from.length && from.as<float>() < part.value + part.count;
    };
    if (std::any_of(comes.views.begin(), comes.views.end(), lies_in)) return not_taken();
    if (is_set(skip)) return nb::none();
    unlocked([&] { move_put(target.as<float>(), from.as<float>(), from.length, stays.views, comes.views); });
    return nb::none();
}

void bind_sparse(nb::module_ &m) {
    m.def("move_put_", move_put_into, nb::arg(), nb::arg(), nb::arg(), nb::arg(), nb::arg().none());
    m.def("locate", [](nb::handle rows, nb::handle place) {
        const Read region(rows);
        const Tensor asked = read(place);
        if (!region.taken() || !asked.is(Element::int32)) return not_taken();
        region.expect_enough();
        const Made position = make(asked.length, Element::int32);
        if (!unlocked([&] { return locate(region.rows, asked.as<int32_t>(), asked.length, position.as<int32_t>()); })) {
            const auto [low, high] = std::minmax_element(asked.as<int32_t>(), asked.as<int32_t>() + asked.length);
            refuse_positions(region.rows.length, *low, *high);
        }
        return position.object;
    });
    m.def("divide_rows_", [](nb::handle x, nb::handle rows, double divisor) {
        const Tensor vector = read(x);
        const Read region(rows);
        if (!vector.is(Element::float32) || !region.taken()) return not_taken();
        region.expect_enough();
        region.expect_inside(vector.length);
        unlocked([&] { divide_rows(vector.as<float>(), region.rows, static_cast<float>(divisor)); });
        return nb::object(nb::none());
    });
    m.def("merge", [](nb::handle parts) { return merged(parts, false); });
    m.def("coalesce", [](nb::handle parts) { return merged(parts, true); });
    m.def("split", split_at);
    m.def("isin", [](nb::handle index, nb::handle others) {
        const Tensor asked = read(index), known = read(others);
        if (!asked.is(Element::int32) || !known.is(Element::int32)) return not_taken();
        const Made found = make(asked.length, Element::boolean);
        unlocked([&] { isin(asked.as<int32_t>(), asked.length, known.as<int32_t>(), known.length, found.as<bool>()); });
        return found.object;
    });
}

}  // namespace

void bind_kernels(nb::module_ &m) {
    sparse_class = nb::object(nb::module_::import_("sparsync.core").attr("Sparse")).release().ptr();
    m.def("levels", [] {
        std::vector<std::string> names;
        for (const Level &each : levels()) names.emplace_back(each.name);
        return names;
    });
    m.def("set_level", [](const std::string &name) {
        if (!set_level(name)) throw nb::value_error(("this machine has no kernels for " + name).c_str());
    });
    bind_passes(m);
    bind_selection(m);
    bind_positions(m);
    bind_sparse(m);
}
