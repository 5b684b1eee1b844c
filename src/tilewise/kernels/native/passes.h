// The passes of a planned call: by their plans, by torch, or by functions in Python.

#pragma once

#include "plan_pass.h"

#include <ATen/PythonTorchFunctionTLS.h>
#include <ATen/autocast_mode.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/convolution.h>
#include <ATen/ops/convolution_backward.h>
#include <ATen/ops/sum.h>
#include <c10/core/DeviceGuard.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/variable.h>

#include <array>
#include <optional>

namespace {

using torch::autograd::Node;
using torch::autograd::variable_list;
using Mask = std::array<bool, 3>; // of the gradients of input, weight and bias

// A convolution in torch's terms.
struct Geometry {
  Ints stride, padding, dilation, output_padding;
  bool transposed = false;
  int64_t groups = 1;
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

// The passes of a planned call.
struct Passes {
  Pass forward;     // of (x, w, b): the result
  Pass grad_input;  // of (dy, w): a gradient with torch's strides
  Pass grad_weight; // of (x, dy), or (dy, x) of a transposed layer: likewise
};

// The Python object.
struct PlannedCall {
  PyObject_HEAD
  vectorcallfunc vectorcall;
  Passes* passes;
  PyObject* backward; // backward(dy, x, w, mask): all gradients, whatever the operands look like
  Geometry* geometry;
  Ints* gradient_strides; // of the result's gradient, as the plans expect it
  PyObject* otherwise; // a PlannedCall for a gradient with other strides of axes of size 1, or null
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

// A mask as a tuple.
Reference flags_of(Mask mask) {
  Reference made(Py_BuildValue("(NNN)", PyBool_FromLong(mask[0]), PyBool_FromLong(mask[1]), PyBool_FromLong(mask[2])));
  if (!made.get())
    throw python_error();
  return made;
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
  const Passes& passes = *plan->passes;
  const bool weight_by_torch = mask[1] && !passes.grad_weight;
  const Mask by = {mask[0] && !passes.grad_input, weight_by_torch, mask[2] && weight_by_torch};
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
      grads[0] = passes.grad_input(dy, w);
    if (mask[1] && !by[1])
      grads[1] = plan->geometry->transposed ? passes.grad_weight(dy, x) : passes.grad_weight(x, dy);
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
  if (self->passes->forward)
    return self->passes->forward(x, w, b);
  const Geometry& g = *self->geometry;
  const std::optional<Tensor> bias = b.defined() ? std::optional<Tensor>(b) : std::nullopt;
  return at::convolution(x, w, bias, g.stride, g.padding, g.dilation, g.transposed, g.output_padding, g.groups);
}

} // namespace
