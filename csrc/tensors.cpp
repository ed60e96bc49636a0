#include "tensors.hpp"

#include <cstdint>

namespace sparsync {

namespace {

// The part of dlpack.h, version 1, that is used here; its layout is stable within the major version.
struct Version {
    uint32_t major, minor;
};

struct DLDevice {
    int32_t type, id;
};

struct DLDataType {
    uint8_t code, bits;
    uint16_t lanes;
};

struct DLTensor {
    void *data;
    DLDevice device;
    int32_t ndim;
    DLDataType dtype;
    int64_t *shape, *strides;
    uint64_t byte_offset;
};

struct Managed {
    Version version;
    void *manager_context;
    void (*deleter)(Managed *);
    uint64_t flags;
    DLTensor tensor;
};

using SetError = void (*)(void *context, const char *kind, const char *message);

struct Exchange {
    Version version;
    void *older;
    int (*allocate)(DLTensor *prototype, Managed **out, void *error_context, SetError set_error);
    int (*managed_from_object)(void *object, Managed **out);
    int (*managed_to_object)(Managed *tensor, void **object);
    int (*read)(void *object, DLTensor *out);
    void *current_work_stream;
};

constexpr uint32_t kMajor = 1;
constexpr int32_t kCpu = 1;
constexpr uint8_t kInt = 0, kUnsigned = 1, kFloat = 2, kBfloat = 4, kBool = 6;

constexpr DLDataType kTypes[] = {
    {kFloat, 32, 1}, {kBfloat, 16, 1}, {kFloat, 16, 1}, {kInt, 32, 1}, {kInt, 64, 1}, {kUnsigned, 8, 1}, {kBool, 8, 1}};

const Exchange *torch_exchange = nullptr;  // of a class that lives as long as the process
PyTypeObject *torch_tensor = nullptr;

Element element_of(DLDataType type) {
    for (int element = 0; element < static_cast<int>(Element::other); ++element) {
        const DLDataType &known = kTypes[element];
        if (type.code == known.code && type.bits == known.bits && type.lanes == 1) return static_cast<Element>(element);
    }
    return Element::other;
}

// -1 where the elements are not one after the other, or there is no memory.
int64_t contiguous_bytes(const DLTensor &tensor) {
    int64_t count = 1;
    for (int32_t i = tensor.ndim; i-- > 0;) {
        if (tensor.strides && tensor.shape[i] > 1 && tensor.strides[i] != count) return -1;
        count *= tensor.shape[i];
    }
    if (!tensor.data && count > 0) return -1;
    return tensor.dtype.bits % 8 ? -1 : count * tensor.dtype.bits / 8 * tensor.dtype.lanes;
}

void raise(void *, const char *, const char *message) {
    const nb::gil_scoped_acquire held;
    PyErr_SetString(PyExc_RuntimeError, message);
}

}  // namespace

Tensor read(nb::handle tensor) {
    if (!PyObject_TypeCheck(tensor.ptr(), torch_tensor)) {
        const nb::str kind = nb::type_name(tensor.type());
        throw nb::type_error((std::string("kernels take tensors of torch, got ") + kind.c_str()).c_str());
    }
    DLTensor seen;
    Tensor found;
    if (torch_exchange->read(tensor.ptr(), &seen)) {  // a tensor without memory, such as one on the meta device
        PyErr_Clear();
        return found;
    }
    if (seen.device.type != kCpu) return found;
    found.nbytes = contiguous_bytes(seen);
    found.element = element_of(seen.dtype);
    found.data = static_cast<char *>(seen.data) + seen.byte_offset;
    if (seen.ndim != 1) return found;
    found.length = seen.shape[0];
    if (!seen.data && found.length > 0)  // a fake tensor, or one whose storage was resized to nothing
        throw nb::value_error(("kernels take tensors with memory, got one of " + std::to_string(found.length) +
                               " elements without any; fill its storage first").c_str());
    const bool contiguous = found.length <= 1 || !seen.strides || seen.strides[0] == 1;
    found.plain = contiguous && found.length < int64_t{1} << 31;
    return found;
}

Made make(int64_t length, Element element) {
    DLTensor prototype{nullptr, {kCpu, 0}, 1, kTypes[static_cast<int>(element)], &length, nullptr, 0};
    Managed *managed = nullptr;
    if (torch_exchange->allocate(&prototype, &managed, nullptr, raise)) throw nb::python_error();
    void *data = static_cast<char *>(managed->tensor.data) + managed->tensor.byte_offset;
    void *object = nullptr;
    if (torch_exchange->managed_to_object(managed, &object)) throw nb::python_error();
    return {nb::steal(static_cast<PyObject *>(object)), data};
}

void find_torch() {
    nb::object tensor = nb::module_::import_("torch").attr("Tensor");
    const nb::object capsule = nb::getattr(tensor, "__dlpack_c_exchange_api__", nb::none());
    const auto *exchange = static_cast<const Exchange *>(PyCapsule_GetPointer(capsule.ptr(), "dlpack_exchange_api"));
    if (!exchange || exchange->version.major != kMajor || !exchange->read) {
        PyErr_Clear();
        throw nb::import_error("this torch has no DLPack exchange interface of version 1; torch 2.13 has one");
    }
    torch_exchange = exchange;
    torch_tensor = reinterpret_cast<PyTypeObject *>(tensor.release().ptr());
}

}  // namespace sparsync
