// The passes of a planned call: by their plans, by torch, or by functions in Python.

#pragma once

#include <Python.h>

#include <ATen/PythonTorchFunctionTLS.h>
#include <ATen/autocast_mode.h>
#include <ATen/core/Tensor.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/convolution.h>
#include <ATen/ops/convolution_backward.h>
#include <ATen/ops/sum.h>
#include <c10/core/DeviceGuard.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <torch/csrc/Exceptions.h>
#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/python_variable.h>
#include <torch/csrc/autograd/variable.h>

#include <array>
#include <optional>
#include <utility>
#include <vector>

namespace {

using at::Tensor;
using torch::autograd::Node;
using torch::autograd::variable_list;
using Mask = std::array<bool, 3>; // of the gradients of input, weight and bias
using Ints = std::vector<int64_t>;

// A convolution in torch's terms.
struct Geometry {
  Ints stride, padding, dilation, output_padding;
  bool transposed = false;
  int64_t groups = 1;
};

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

// Hold the interpreter's lock, in any thread.
class Locked {
 public:
  Locked() : state_(PyGILState_Ensure()) {}
  ~Locked() {
    PyGILState_Release(state_);
  }
  Locked(const Locked&) = delete;
  Locked& operator=(const Locked&) = delete;

 private:
  PyGILState_STATE state_;
};

// The Python object. A pass whose function is null is computed by torch.
struct PlannedCall {
  PyObject_HEAD
  vectorcallfunc vectorcall;
  PyObject* forward;     // forward(x, w, b): the result
  PyObject* grad_input;  // grad_input(dy, w): a gradient with torch's strides
  PyObject* grad_weight; // grad_weight(x, dy), or (dy, x) of a transposed layer: likewise
  PyObject* backward;    // backward(dy, x, w, mask): all gradients, whatever the operands look like
  Geometry* geometry;
  Ints* gradient_strides; // of the result's gradient, as the plans expect it
  Ints* x_strides;        // of the operands, likewise
  Ints* w_strides;
  int64_t misaligned;      // bits of an address that must be 0
  int64_t autocast;        // the dtype that operands are cast to, or -1
};

extern PyTypeObject PlannedCallType;

// What torch's dispatcher may be told in this thread while plans compute: nothing that wants to see operators.
bool is_undisturbed() {
  static const c10::DispatchKeySet usual =
      c10::autocast_dispatch_keyset | c10::DispatchKeySet({c10::DispatchKey::BackendSelect, c10::DispatchKey::ADInplaceOrView});
  const uint64_t included = c10::impl::tls_local_dispatch_key_set().included_.raw_repr();
  return !(included & ~usual.raw_repr()) && !at::impl::torch_function_mode_enabled();
}

// Whether a tensor is plain and lies as a plan expects it.
bool fits(const Tensor& t, const Ints& strides, int64_t misaligned) {
  static const c10::DispatchKeySet usual = c10::autocast_dispatch_keyset | c10::autograd_dispatch_keyset |
      c10::DispatchKeySet({c10::DispatchKey::Dense, c10::DispatchKey::ADInplaceOrView}) |
      c10::DispatchKeySet(c10::DispatchKeySet::RAW, c10::full_backend_mask);
  return !(t.key_set().raw_repr() & ~usual.raw_repr()) && t.layout() == at::kStrided && t.strides() == c10::IntArrayRef(strides) &&
      !(reinterpret_cast<uintptr_t>(t.const_data_ptr()) & misaligned);
}

// A tensor in Python; None for an undefined one. The interpreter's lock is held.
Reference wrapped(const Tensor& t) {
  Reference made(t.defined() ? THPVariable_Wrap(t) : Py_NewRef(Py_None));
  if (!made.get())
    throw python_error();
  return made;
}

// A mask as a tuple.
Reference flags_of(Mask mask) {
  Reference made(Py_BuildValue("(NNN)", PyBool_FromLong(mask[0]), PyBool_FromLong(mask[1]), PyBool_FromLong(mask[2])));
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

// The gradients by torch, differentiable themselves. `bias` is its length.
variable_list gradients_by_torch(const Geometry& g, const Tensor& dy, const Tensor& x, const Tensor& w, int64_t bias, Mask mask) {
  auto [dx, dw, db] = at::convolution_backward(
      dy, x, w, mask[2] ? at::OptionalIntArrayRef(bias) : std::nullopt, g.stride, g.padding, g.dilation, g.transposed,
      g.output_padding, g.groups, mask);
  return {dx, dw, db};
}

// The gradients by plans, those that have none by one call of torch. Operands lie as plans expect them.
variable_list gradients_by_plans(const PlannedCall* plan, const Tensor& dy, const Tensor& x, const Tensor& w, Mask mask) {
  const c10::impl::ExcludeDispatchKeyGuard without_autocast(c10::autocast_dispatch_keyset);
  const c10::OptionalDeviceGuard device(dy.device());
  const bool weight_by_torch = mask[1] && !plan->grad_weight;
  const Mask by = {mask[0] && !plan->grad_input, weight_by_torch, mask[2] && weight_by_torch};
  variable_list grads(3);
  if (by[0] || by[1])
    grads = gradients_by_torch(*plan->geometry, dy, x, w, dy.size(1), by);
  if (mask[2] && !by[2]) {
    Ints along;
    for (int64_t i = 0; i < dy.dim(); i++)
      if (i != 1)
        along.push_back(i);
    grads[2] = dy.sum(along);
  }
  if ((mask[0] && !by[0]) || (mask[1] && !by[1])) {
    Locked lock;
    if (mask[0] && !by[0])
      grads[0] = call<2>(plan->grad_input, {&dy, &w});
    if (mask[1] && !by[1])
      grads[1] = plan->geometry->transposed ? call<2>(plan->grad_weight, {&dy, &x}) : call<2>(plan->grad_weight, {&x, &dy});
  }
  return grads;
}

// A tensor in the dtype that autocast asks for. As torch does, a weight is cast once for all its uses.
Tensor cast(const PlannedCall* self, const Tensor& t) {
  if (self->autocast < 0 || !t.defined())
    return t;
  return at::autocast::cached_cast(static_cast<at::ScalarType>(self->autocast), t, t.device().type());
}

Tensor computed(PlannedCall* self, const Tensor& x, const Tensor& w, const Tensor& b) {
  const at::NoGradGuard without_gradients;
  if (self->forward)
    return call<3>(self->forward, {&x, &w, &b});
  const Geometry& g = *self->geometry;
  const std::optional<Tensor> bias = b.defined() ? std::optional<Tensor>(b) : std::nullopt;
  return at::convolution(x, w, bias, g.stride, g.padding, g.dilation, g.transposed, g.output_padding, g.groups);
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

} // namespace
