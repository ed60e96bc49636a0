// Tensors of torch as the bindings take and return them: read and made by DLPack's exchange interface, a table of C functions that
// torch.Tensor carries. Reading one that way takes 25 ns, nb::ndarray about 2 us, and asking for address, length, type, device and
// strides from Python 400 ns; so every tensor is checked here, and no address comes from Python.
#pragma once

#include <nanobind/nanobind.h>

#include <cstdint>
#include <string>

namespace sparsync {

namespace nb = nanobind;

enum class Element { float32, bfloat16, float16, int32, int64, uint8, boolean, other };

// A tensor that somebody else holds.
struct Tensor {
    void *data = nullptr;
    int64_t length = 0;
    Element element = Element::other;
    bool plain = false;  // one-dimensional, contiguous, in this machine's memory, and of less than 2^31 elements
    int64_t nbytes = -1;  // of a contiguous tensor of any shape in this machine's memory; -1 of any other

    bool is(Element wanted) const { return plain && element == wanted; }
    bool is_gradient() const {
        return plain && (element == Element::float32 || element == Element::bfloat16 || element == Element::float16);
    }
    bool is_index() const { return plain && (element == Element::int32 || element == Element::int64); }

    template <class T>
    T *as() const {
        return static_cast<T *>(data);
    }
};

// Raises TypeError for what is no torch.Tensor, and ValueError for one that claims memory it lacks. One on the meta device is not plain.
Tensor read(nb::handle tensor);

// A new tensor of torch. `data` stays valid as long as `object` is held.
struct Made {
    nb::object object;
    void *data;

    template <class T>
    T *as() const {
        return static_cast<T *>(data);
    }
};

Made make(int64_t length, Element element);

// What a function returns for tensors of a type, a device or a shape that it does not take.
inline nb::object not_taken() { return nb::borrow(Py_NotImplemented); }

// Finds torch's table; to be called when the module is loaded. Raises ImportError where torch has none that we know.
void find_torch();

}  // namespace sparsync
