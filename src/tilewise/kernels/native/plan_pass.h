// Pass: one pass of a planned call as its plan computes it.
//
// Where a plan only launches kernels, they are queued from here: the tensors they need are made in C++, and no Python
// object is made for any of them. A plan of a library's calls by address is a function of Python that takes numbers, over
// tensors that are made here as well. Every other plan is called as a function of Python.

#pragma once

#include <Python.h>

#include "launch_api.h"

#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_strided.h>
#include <ATen/ops/zeros.h>
#include <ATen/record_function.h>
#include <torch/csrc/Exceptions.h>
#include <torch/csrc/autograd/python_variable.h>

#include <array>
#include <memory>
#include <string>
#include <utility>
#include <vector>

namespace {

using at::Tensor;
using Ints = std::vector<int64_t>;

// A reference to a Python object, counted. Whoever makes, copies or drops one holds the interpreter's lock.
class Reference {
 public:
  Reference() = default;
  explicit Reference(PyObject* owned) : object_(owned) {}
  Reference(const Reference&) = delete;
  Reference& operator=(const Reference&) = delete;
  Reference(Reference&& other) noexcept : object_(std::exchange(other.object_, nullptr)) {}
  Reference& operator=(Reference&& other) noexcept {
    std::swap(object_, other.object_);
    return *this;
  }
  ~Reference() {
    Py_XDECREF(object_);
  }
  PyObject* get() const {
    return object_;
  }

 private:
  PyObject* object_ = nullptr;
};

// A tensor in Python; None for an undefined one. The interpreter's lock is held.
Reference wrapped(const Tensor& t) {
  Reference made(t.defined() ? THPVariable_Wrap(t) : Py_NewRef(Py_None));
  if (!made.get())
    throw python_error();
  return made;
}

// Call a function of Python with tensors. The interpreter's lock is held. Undefined tensors are None.
template <size_t count>
Tensor call(PyObject* function, const std::array<const Tensor*, count>& tensors) {
  std::array<Reference, count> held;
  std::array<PyObject*, count> arguments;
  for (size_t i = 0; i < count; i++) {
    held[i] = wrapped(*tensors[i]);
    arguments[i] = held[i].get();
  }
  Reference result(PyObject_Vectorcall(function, arguments.data(), count, nullptr));
  if (!result.get())
    throw python_error();
  TORCH_CHECK_TYPE(THPVariable_Check(result.get()), "a plan's call gave a ", Py_TYPE(result.get())->tp_name, ", a tensor would do");
  return THPVariable_Unpack(result.get());
}

// Read a tuple of whole numbers. Returns false with an error set.
bool read_ints(PyObject* given, Ints& into) {
  if (!PyTuple_Check(given)) {
    PyErr_Format(PyExc_TypeError, "%R: a tuple of whole numbers would do", given);
    return false;
  }
  for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(given); i++) {
    into.push_back(PyLong_AsLongLong(PyTuple_GET_ITEM(given, i)));
    if (PyErr_Occurred())
      return false;
  }
  return true;
}

// The kernels of a plan that does nothing else than launch them, over the addresses of two operands, a result, a
// workspace and a bias. Without an API `launches` is a function of Python that takes these addresses.
struct Kernels {
  Reference launches, capsule, stream, device; // stream(device): the current stream of a GPU, as a number
  const LaunchApi* api = nullptr;
  Ints shape, strides; // of the result
  at::ScalarType dtype = at::kFloat;
  int64_t workspace = 0;  // bytes
  int64_t bias_dim = 0;   // the result's dimension along which a bias lies
  bool adds_bias = false; // whether kernels add it
  std::string range;      // the name under which a profiler shows a call; empty for none
};

class Pass {
 public:
  // Whether a plan computes the pass; else torch does.
  explicit operator bool() const {
    return call_.get();
  }

  // The result. A bias is undefined where there is none. The interpreter's lock is held.
  Tensor operator()(const Tensor& a, const Tensor& b, const Tensor& bias = Tensor()) const {
    if (kernels_ && !kernels_->api)
      return launched(a, b, bias);
    if (kernels_) {
      const int left = kernels_->api->left_to_python(kernels_->launches.get());
      if (left < 0)
        throw python_error();
      if (!left)
        return launched(a, b, bias);
    }
    return bias.defined() ? call<3>(call_.get(), {&a, &b, &bias}) : call<2>(call_.get(), {&a, &b});
  }

  // Read None, or (call, kernels) with None or Kernels as sequence.py has it. Returns false with an error set.
  bool read(PyObject* given) {
    PyObject *function, *described;
    if (given == Py_None)
      return true;
    if (!PyTuple_Check(given) || !PyArg_ParseTuple(given, "OO;a pass is None or (call, kernels)", &function, &described)) {
      if (!PyErr_Occurred())
        PyErr_Format(PyExc_TypeError, "%R: a pass is None or (call, kernels)", given);
      return false;
    }
    call_ = Reference(Py_NewRef(function));
    return described == Py_None || read_kernels(described);
  }

  int traverse(visitproc visit, void* arg) const {
    Py_VISIT(call_.get());
    if (kernels_)
      Py_VISIT(kernels_->launches.get());
    return 0;
  }

  void clear() {
    kernels_.reset();
    call_ = Reference();
  }

 private:
  Reference call_; // call(a, b) or call(a, b, bias)
  std::unique_ptr<Kernels> kernels_;

  bool read_kernels(PyObject* described) {
    PyObject *launches, *capsule, *stream, *device, *shape, *strides;
    int dtype, adds;
    long long workspace, bias_dim;
    const char* range;
    if (!PyArg_ParseTuple(described, "OOOOOOiLLps;kernels are described by sequence.py", &launches, &capsule, &stream, &device,
                          &shape, &strides, &dtype, &workspace, &bias_dim, &adds, &range))
      return false;
    auto made = std::make_unique<Kernels>();
    if (capsule != Py_None && !(made->api = static_cast<const LaunchApi*>(PyCapsule_GetPointer(capsule, LAUNCH_API))))
      return false;
    if (!read_ints(shape, made->shape) || !read_ints(strides, made->strides))
      return false;
    if (bias_dim < 0 || bias_dim >= static_cast<long long>(made->shape.size())) {
      PyErr_Format(PyExc_ValueError, "bias_dim=%lld: a dimension of the result would do", bias_dim);
      return false;
    }
    made->launches = Reference(Py_NewRef(launches));
    made->capsule = Reference(Py_NewRef(capsule));
    made->stream = Reference(Py_NewRef(stream));
    made->device = Reference(Py_NewRef(device));
    made->dtype = static_cast<at::ScalarType>(dtype);
    made->workspace = workspace;
    made->bias_dim = bias_dim;
    made->adds_bias = adds;
    made->range = range;
    kernels_ = std::move(made);
    return true;
  }

  // Without a profiler its range costs a look at whether there is one.
  Tensor launched(const Tensor& a, const Tensor& b, const Tensor& bias) const {
    const Kernels& k = *kernels_;
    at::RecordFunction range(at::RecordScope::USER_SCOPE);
    if (range.isActive() && !k.range.empty())
      range.before(std::string_view(k.range));
    const at::TensorOptions like = a.options().requires_grad(std::nullopt);
    Tensor out = at::empty_strided(k.shape, k.strides, like.dtype(k.dtype)), workspace, fitted;
    if (k.workspace)
      workspace = at::empty({k.workspace}, like.dtype(at::kByte));
    if (k.adds_bias)
      fitted = fitting(bias, like);
    const uint64_t addresses[] = {place(a), place(b), place(out), place(workspace), place(fitted)};
    // The allocator gives the workspace to later kernels of this stream alone, so it may go once these are queued.
    k.api ? queue(k, addresses) : call_by_address(k, addresses);
    if (bias.defined() && !k.adds_bias) {
      Ints along(k.shape.size(), 1);
      along[static_cast<size_t>(k.bias_dim)] = -1;
      out.add_(bias.view(along));
    }
    return out;
  }

  static void queue(const Kernels& k, const uint64_t* addresses) {
    PyObject* device = k.device.get();
    Reference number(PyObject_Vectorcall(k.stream.get(), &device, 1, nullptr));
    void* stream = number.get() ? PyLong_AsVoidPtr(number.get()) : nullptr;
    if (PyErr_Occurred() || k.api->queue(k.launches.get(), stream, addresses))
      throw python_error();
  }

  static void call_by_address(const Kernels& k, const uint64_t* addresses) {
    std::array<Reference, 5> numbers;
    std::array<PyObject*, 5> arguments;
    const size_t count = k.adds_bias ? 5 : 4;
    for (size_t i = 0; i < count; i++) {
      numbers[i] = Reference(PyLong_FromUnsignedLongLong(addresses[i]));
      if (!(arguments[i] = numbers[i].get()))
        throw python_error();
    }
    const Reference done(PyObject_Vectorcall(k.launches.get(), arguments.data(), count, nullptr));
    if (!done.get())
      throw python_error();
  }

  static uint64_t place(const Tensor& t) {
    return t.defined() ? reinterpret_cast<uintptr_t>(t.const_data_ptr()) : 0;
  }

  // The bias as kernels take it, contiguous and in the result's type; zeros where none is given.
  Tensor fitting(const Tensor& bias, const at::TensorOptions& like) const {
    const int64_t channels = kernels_->shape[static_cast<size_t>(kernels_->bias_dim)];
    if (!bias.defined())
      return at::zeros({channels}, like.dtype(kernels_->dtype));
    TORCH_CHECK_VALUE(bias.dim() == 1 && bias.size(0) == channels && bias.device() == like.device(), "bias of ", bias.sizes(), " on ",
                      bias.device(), ": (", channels, ",) on ", like.device(), " would do");
    return bias.to(kernels_->dtype).contiguous();
  }
};

} // namespace
