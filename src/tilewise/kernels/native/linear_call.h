// LinearCall: one kind of call of a planned linear layer, with autograd, in one call of native code.
//
// What it computes is what LinearRun in nn/layers/linear/run.py computes. Plans see matrices; here tensors have the
// layer's own shapes, in which results are made at once: a view of a result could not be changed in place afterwards.

#pragma once

#include "backward_node.h"

#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/ops/_unsafe_view.h>
#include <ATen/ops/linear.h>
#include <ATen/ops/mm.h>

namespace {

// What a call has, and its plans.
struct LinearPlan {
  Passes passes; // of (x, w, b), (dy, w) and (dy, x), or (x, dy) where the weight is turned
  Ints x_shape, x_strides, y_shape, y_strides, w_strides;
  int64_t rows = 0, into = 0, outputs = 0;
  bool turned = false;    // the weight is the transpose of a contiguous matrix
  int64_t misaligned = 0; // bits of an address that must be 0
  int64_t autocast = -1;  // the dtype that operands are cast to, or -1
};

struct LinearCall {
  PyObject_HEAD
  vectorcallfunc vectorcall;
  LinearPlan* plan;
  PyObject* backward; // backward(dy, x, w, mask): all gradients, whatever the operands look like
};

// The gradients as compiled autograd traces them: by one operator of torch's own products. It is defined in Python
// (nn/layers/linear/compiled.py), as the shape of `dy` is not known while tracing.
variable_list linear_traced(const LinearPlan& p, const Tensor& dy, const Tensor& x, const Tensor& w, Mask mask) {
  using Gradients = std::vector<Tensor>(const Tensor&, const std::optional<Tensor>&, const std::optional<Tensor>&, at::IntArrayRef, int64_t, int64_t);
  static const auto op = c10::Dispatcher::singleton().findSchemaOrThrow("tilewise::linear_gradients", "").typed<Gradients>();
  const auto held = [](const Tensor& t) { return t.defined() ? std::optional<Tensor>(t) : std::nullopt; };
  const int64_t bits = mask[0] + 2 * mask[1] + 4 * mask[2];
  const std::vector<Tensor> found = op.call(dy, held(x), held(w), p.x_shape, p.outputs, bits);
  variable_list grads(3);
  auto next = found.begin();
  for (size_t i = 0; i < 3; i++)
    if (mask[i] && next != found.end())
      grads[i] = *next++;
  return grads;
}

// The gradients by plans where there are any. Operands lie as plans expect them.
variable_list linear_by_plans(const LinearPlan& p, const Tensor& dy, const Tensor& x, const Tensor& w, Mask mask) {
  const c10::impl::ExcludeDispatchKeyGuard without_autocast(c10::autocast_dispatch_keyset);
  const c10::OptionalDeviceGuard device(dy.device());
  const Mask planned = {mask[0] && p.passes.grad_input, mask[1] && p.passes.grad_weight, false};
  variable_list grads(3);
  if (planned[0] || planned[1]) {
    Locked lock;
    if (planned[0])
      grads[0] = p.passes.grad_input(dy, w);
    if (planned[1])
      grads[1] = p.turned ? p.passes.grad_weight(x, dy) : p.passes.grad_weight(dy, x);
  }
  if (!(mask[0] && !planned[0]) && !(mask[1] && !planned[1]) && !mask[2])
    return grads;
  const Tensor flat = dy.view({p.rows, p.outputs});
  if (mask[0] && !planned[0])
    grads[0] = at::_unsafe_view(flat.mm(w), p.x_shape);
  if (mask[1] && !planned[1]) {
    const Tensor other = x.view({p.rows, p.into});
    grads[1] = p.turned ? other.t().mm(flat).t() : flat.t().mm(other);
  }
  if (mask[2])
    grads[2] = flat.sum(0);
  return grads;
}

struct PlannedLinearBackward : public Node {
  PyObject* call_; // a LinearCall, owned
  SavedVariable x_, w_; // the input for the weight's gradient, and the weight for the input's

  PlannedLinearBackward(PyObject* owner, const Tensor& x, const Tensor& w)
      : call_(Py_NewRef(owner)), x_(w.requires_grad() ? x : Tensor(), false), w_(x.requires_grad() ? w : Tensor(), false) {}

  ~PlannedLinearBackward() override {
    if (!Py_IsInitialized())
      return; // the process ends
    Locked lock;
    Py_DECREF(call_);
  }

  std::string name() const override {
    return "PlannedLinearBackward";
  }

  void release_variables() override {
    std::lock_guard<std::mutex> lock(mutex_);
    x_.reset_data();
    w_.reset_data();
  }

  const LinearCall* call() const {
    return reinterpret_cast<LinearCall*>(call_);
  }

  // All gradients by the function in Python, which looks at everything.
  variable_list by_python(const Tensor& dy, const Tensor& x, const Tensor& w, Mask mask) const {
    Locked lock;
    Reference tensors[3] = {wrapped(dy), wrapped(x), wrapped(w)};
    Reference asked = flags_of(mask);
    PyObject* arguments[4] = {tensors[0].get(), tensors[1].get(), tensors[2].get(), asked.get()};
    TORCH_CHECK(call()->backward, "the planned call was cleared: it is no longer in use");
    Reference found(PyObject_Vectorcall(call()->backward, arguments, 4, nullptr));
    if (!found.get())
      throw python_error();
    TORCH_CHECK_TYPE(PyTuple_Check(found.get()) && PyTuple_GET_SIZE(found.get()) == 3, "backward gave no three gradients");
    variable_list grads(3);
    for (int i = 0; i < 3; i++)
      if (PyObject* grad = PyTuple_GET_ITEM(found.get(), i); grad != Py_None)
        grads[static_cast<size_t>(i)] = THPVariable_Unpack(grad);
    return grads;
  }

  variable_list apply(variable_list&& given) override {
    std::lock_guard<std::mutex> lock(mutex_);
    const Tensor dy = std::move(given[0]);
    if (!dy.defined())
      return variable_list(3);
    const Mask mask = {task_should_compute_output(0), task_should_compute_output(1), task_should_compute_output(2)};
    const Tensor x = x_.unpack(), w = w_.unpack();
    const LinearPlan& p = *call()->plan;
    const auto lies = [&p](const Tensor& t, const Ints& strides) { return !t.defined() || fits(t, strides, p.misaligned); };
    const bool usual = !at::GradMode::is_enabled() && is_undisturbed() && fits(dy, p.y_strides, p.misaligned) &&
        lies(x, p.x_strides) && lies(w, p.w_strides);
    return usual ? linear_by_plans(p, dy, x, w, mask) : by_python(dy, x, w, mask);
  }

  // Compiled autograd traces backward as torch computes it.
  void compiled_args(torch::dynamo::autograd::CompiledNodeArgs& args) const override {
    const LinearPlan& p = *call()->plan;
    args.collect(x_, false);
    args.collect(w_, false);
    args.collect(p.x_shape);
    args.collect(p.outputs);
  }

  variable_list apply_with_saved(const variable_list& given, torch::dynamo::autograd::SwapSavedVariables& saved) override {
    saved.before(x_);
    saved.before(w_);
    const Mask mask = {task_should_compute_output(0), task_should_compute_output(1), task_should_compute_output(2)};
    variable_list grads(3);
    if (given[0].defined())
      grads = linear_traced(*call()->plan, given[0], x_.unpack(), w_.unpack(), mask);
    saved.after(x_);
    saved.after(w_);
    return grads;
  }
};

// Nodes are counted by one pointer or another, as the version of torch has it.
template <class Pointer>
Pointer made_linear(PyObject* owner, const Tensor& x, const Tensor& w) {
  if constexpr (std::is_constructible_v<Pointer, Node*, void (*)(Node*)>)
    return Pointer(new PlannedLinearBackward(owner, x, w), [](Node* node) { delete node; });
  else
    return c10::make_intrusive<PlannedLinearBackward>(owner, x, w);
}

PyObject* linear_call(PyObject* object, PyObject* const* arguments, size_t flags, PyObject* names) {
  HANDLE_TH_ERRORS
  const LinearCall* self = reinterpret_cast<LinearCall*>(object);
  TORCH_CHECK_TYPE(PyVectorcall_NARGS(flags) == 3 && !names && THPVariable_Check(arguments[0]) && THPVariable_Check(arguments[1]),
                   "a planned call takes an input, a weight, and a bias or None");
  TORCH_CHECK(self->backward, "the planned call was cleared: it is no longer in use");
  const LinearPlan& p = *self->plan;
  const auto cast = [&p](const Tensor& t) {
    return p.autocast < 0 ? t : at::autocast::cached_cast(static_cast<at::ScalarType>(p.autocast), t, t.device().type());
  };
  const Tensor x = cast(THPVariable_Unpack(arguments[0])), w = cast(THPVariable_Unpack(arguments[1]));
  const Tensor b = arguments[2] == Py_None ? Tensor() : cast(THPVariable_Unpack(arguments[2]));
  const c10::impl::ExcludeDispatchKeyGuard without_autocast(c10::autocast_dispatch_keyset);
  const c10::OptionalDeviceGuard device(x.device());
  Tensor y;
  {
    const at::NoGradGuard without_gradients;
    if (p.passes.forward)
      y = p.passes.forward(x, w, b);
    else
      y = at::linear(x, w, b.defined() ? std::optional<Tensor>(b) : std::nullopt);
  }
  if (at::GradMode::is_enabled() && (x.requires_grad() || w.requires_grad() || (b.defined() && b.requires_grad()))) {
    NodePointer node = made_linear<NodePointer>(object, x, w);
    node->set_next_edges(torch::autograd::collect_next_edges(x, w, b));
    torch::autograd::set_history(y, node);
  }
  return THPVariable_Wrap(y);
  END_HANDLE_TH_ERRORS
}

// --- Making one ------------------------------------------------------------------------------------------------------

PyObject* linear_new(PyTypeObject* type, PyObject* args, PyObject* kwargs) {
  HANDLE_TH_ERRORS
  static const char* names[] = {"forward", "grad_input", "grad_weight", "backward", "shapes", "strides", "turned", "misaligned", "autocast", nullptr};
  PyObject *forward, *grad_input, *grad_weight, *backward, *shapes[2], *strides[3];
  int turned;
  long long misaligned, autocast;
  if (!PyArg_ParseTupleAndKeywords(args, kwargs, "OOOO(OO)(OOO)pLL:LinearCall", const_cast<char**>(names), &forward, &grad_input,
                                   &grad_weight, &backward, &shapes[0], &shapes[1], &strides[0], &strides[1], &strides[2], &turned,
                                   &misaligned, &autocast))
    return nullptr;
  auto plan = std::make_unique<LinearPlan>();
  if (!read_ints(shapes[0], plan->x_shape) || !read_ints(shapes[1], plan->y_shape) || !read_ints(strides[0], plan->x_strides) ||
      !read_ints(strides[1], plan->y_strides) || !read_ints(strides[2], plan->w_strides) || !plan->passes.forward.read(forward) ||
      !plan->passes.grad_input.read(grad_input) || !plan->passes.grad_weight.read(grad_weight))
    return nullptr;
  if (plan->x_shape.empty() || plan->x_shape.size() != plan->y_shape.size())
    return PyErr_Format(PyExc_ValueError, "shapes=(%R, %R): those of an input and of its result would do", shapes[0], shapes[1]);
  plan->into = plan->x_shape.back();
  plan->outputs = plan->y_shape.back();
  plan->rows = 1;
  for (size_t i = 0; i + 1 < plan->x_shape.size(); i++)
    plan->rows *= plan->x_shape[i];
  plan->turned = turned;
  plan->misaligned = misaligned;
  plan->autocast = autocast;
  LinearCall* self = reinterpret_cast<LinearCall*>(type->tp_alloc(type, 0));
  if (!self)
    return nullptr;
  self->vectorcall = linear_call;
  self->plan = plan.release();
  self->backward = Py_NewRef(backward);
  return reinterpret_cast<PyObject*>(self);
  END_HANDLE_TH_ERRORS
}

int linear_traverse(PyObject* object, visitproc visit, void* arg) {
  LinearCall* self = reinterpret_cast<LinearCall*>(object);
  Py_VISIT(self->backward);
  if (!self->plan)
    return 0;
  for (const Pass* pass : {&self->plan->passes.forward, &self->plan->passes.grad_input, &self->plan->passes.grad_weight})
    if (const int found = pass->traverse(visit, arg))
      return found;
  return 0;
}

int linear_clear(PyObject* object) {
  LinearCall* self = reinterpret_cast<LinearCall*>(object);
  Py_CLEAR(self->backward);
  if (self->plan)
    for (Pass* pass : {&self->plan->passes.forward, &self->plan->passes.grad_input, &self->plan->passes.grad_weight})
      pass->clear();
  return 0;
}

void linear_dealloc(PyObject* object) {
  PyObject_GC_UnTrack(object);
  linear_clear(object);
  delete reinterpret_cast<LinearCall*>(object)->plan;
  Py_TYPE(object)->tp_free(object);
}

PyTypeObject LinearCallType = [] {
  PyTypeObject type = {PyVarObject_HEAD_INIT(nullptr, 0)};
  type.tp_name = "planned_call.LinearCall";
  type.tp_doc = "LinearCall(forward, grad_input, grad_weight, backward, shapes, strides, turned, misaligned, autocast)";
  type.tp_basicsize = sizeof(LinearCall);
  type.tp_flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC | Py_TPFLAGS_HAVE_VECTORCALL;
  type.tp_vectorcall_offset = offsetof(LinearCall, vectorcall);
  type.tp_call = PyVectorcall_Call;
  type.tp_new = linear_new;
  type.tp_dealloc = linear_dealloc;
  type.tp_traverse = linear_traverse;
  type.tp_clear = linear_clear;
  return type;
}();

} // namespace
