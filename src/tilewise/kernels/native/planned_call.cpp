// PlannedCall: one kind of call of a planned layer, with autograd, in one call of native code.
//
// What it computes is what Runner in nn/layers/runner.py computes: passes by their plans, the others by torch. What it
// saves is the host's time: no Python runs between a call and its kernels, forward or backward, but for the plans'
// own calls. Whatever is unusual is handed to the functions in Python that it is given.

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
#include <torch/csrc/autograd/functions/utils.h>
#include <torch/csrc/autograd/python_cpp_function.h>
#include <torch/csrc/autograd/python_variable.h>
#include <torch/csrc/autograd/saved_variable.h>
#include <torch/csrc/autograd/variable.h>
#include <torch/csrc/dynamo/compiled_autograd.h>

#include <array>
#include <memory>
#include <optional>
#include <type_traits>
#include <utility>
#include <vector>

namespace {

using at::Tensor;
using torch::autograd::Node;
using torch::autograd::SavedVariable;
using torch::autograd::variable_list;
using NodePointer = std::decay_t<decltype(std::declval<torch::autograd::Edge>().function)>;
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
  return (c10::impl::tls_local_dispatch_key_set().included_ - usual).empty() && !at::impl::torch_function_mode_enabled();
}

// Whether a tensor is plain and lies as a plan expects it.
bool fits(const Tensor& t, const Ints& strides, int64_t misaligned) {
  static const c10::DispatchKeySet usual = c10::autocast_dispatch_keyset | c10::autograd_dispatch_keyset |
      c10::DispatchKeySet({c10::DispatchKey::Dense, c10::DispatchKey::ADInplaceOrView}) |
      c10::DispatchKeySet(c10::DispatchKeySet::RAW, c10::full_backend_mask);
  return (t.key_set() - usual).empty() && t.layout() == at::kStrided && t.strides() == c10::IntArrayRef(strides) &&
      !(reinterpret_cast<uintptr_t>(t.const_data_ptr()) & misaligned);
}

// Call a function of Python with tensors. The interpreter's lock is held. Undefined tensors are None.
template <size_t count>
Tensor call(PyObject* function, const std::array<const Tensor*, count>& tensors) {
  std::array<Reference, count> held;
  std::array<PyObject*, count> arguments;
  for (size_t i = 0; i < count; i++) {
    held[i] = Reference(tensors[i]->defined() ? THPVariable_Wrap(*tensors[i]) : Py_NewRef(Py_None));
    if (!(arguments[i] = held[i].get()))
      throw python_error();
  }
  Reference result(PyObject_Vectorcall(function, arguments.data(), count, nullptr));
  if (!result.get())
    throw python_error();
  TORCH_CHECK_TYPE(THPVariable_Check(result.get()), "a plan's call gave a ", Py_TYPE(result.get())->tp_name, ", a tensor would do");
  return THPVariable_Unpack(result.get());
}

// --- Backward --------------------------------------------------------------------------------------------------------

struct PlannedConvBackward : public Node {
  PyObject* call_; // a PlannedCall, owned
  SavedVariable x_, w_;
  int64_t bias_;   // its length, 0 without one

  PlannedConvBackward(PyObject* owner, const Tensor& x, const Tensor& w, const Tensor& b)
      : call_(Py_NewRef(owner)), x_(x, false), w_(w, false), bias_(b.defined() ? b.size(0) : 0) {}

  ~PlannedConvBackward() override {
    if (!Py_IsInitialized())
      return; // the process ends
    Locked lock;
    Py_DECREF(call_);
  }

  std::string name() const override {
    return "PlannedConvBackward";
  }

  void release_variables() override {
    std::lock_guard<std::mutex> lock(mutex_);
    x_.reset_data();
    w_.reset_data();
  }

  const PlannedCall* plans() const {
    return reinterpret_cast<PlannedCall*>(call_);
  }

  // The gradients by torch, differentiable themselves.
  variable_list by_torch(const Tensor& dy, const Tensor& x, const Tensor& w, Mask mask) const {
    const Geometry& g = *plans()->geometry;
    auto [dx, dw, db] = at::convolution_backward(
        dy, x, w, mask[2] ? at::OptionalIntArrayRef(bias_) : std::nullopt, g.stride, g.padding, g.dilation, g.transposed,
        g.output_padding, g.groups, mask);
    return {dx, dw, db};
  }

  // All gradients by the function in Python, which looks at everything.
  variable_list by_python(const Tensor& dy, const Tensor& x, const Tensor& w, Mask mask) const {
    Locked lock;
    Reference tensors[3] = {Reference(THPVariable_Wrap(dy)), Reference(THPVariable_Wrap(x)), Reference(THPVariable_Wrap(w))};
    Reference asked(Py_BuildValue("(NNN)", PyBool_FromLong(mask[0]), PyBool_FromLong(mask[1]), PyBool_FromLong(mask[2])));
    PyObject* arguments[4] = {tensors[0].get(), tensors[1].get(), tensors[2].get(), asked.get()};
    if (!arguments[0] || !arguments[1] || !arguments[2] || !arguments[3])
      throw python_error();
    Reference found(PyObject_Vectorcall(plans()->backward, arguments, 4, nullptr));
    if (!found.get())
      throw python_error();
    TORCH_CHECK_TYPE(PyTuple_Check(found.get()) && PyTuple_GET_SIZE(found.get()) == 3, "backward gave no three gradients");
    variable_list grads(3);
    for (int i = 0; i < 3; i++)
      if (PyObject* grad = PyTuple_GET_ITEM(found.get(), i); grad != Py_None)
        grads[i] = THPVariable_Unpack(grad);
    return grads;
  }

  variable_list apply(variable_list&& given) override {
    std::lock_guard<std::mutex> lock(mutex_);
    const Tensor dy = std::move(given[0]);
    if (!dy.defined())
      return variable_list(3);
    const Mask mask = {task_should_compute_output(0), task_should_compute_output(1), task_should_compute_output(2)};
    const Tensor x = x_.unpack(), w = w_.unpack();
    const PlannedCall* plan = plans();
    const bool usual = !at::GradMode::is_enabled() && is_undisturbed() && fits(dy, *plan->gradient_strides, plan->misaligned) &&
        fits(x, *plan->x_strides, plan->misaligned) && fits(w, *plan->w_strides, plan->misaligned);
    return usual ? by_plans(dy, x, w, mask) : by_python(dy, x, w, mask);
  }

  variable_list by_plans(const Tensor& dy, const Tensor& x, const Tensor& w, Mask mask) const {
    const PlannedCall* plan = plans();
    const c10::impl::ExcludeDispatchKeyGuard without_autocast(c10::autocast_dispatch_keyset);
    const c10::OptionalDeviceGuard device(dy.device());
    const bool weight_by_torch = mask[1] && !plan->grad_weight;
    const Mask by = {mask[0] && !plan->grad_input, weight_by_torch, mask[2] && weight_by_torch};
    variable_list grads(3);
    if (by[0] || by[1])
      grads = by_torch(dy, x, w, by);
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

  // Compiled autograd traces backward as torch computes it.
  void compiled_args(torch::dynamo::autograd::CompiledNodeArgs& args) const override {
    const Geometry& g = *plans()->geometry;
    args.collect(x_, false);
    args.collect(w_, false);
    args.collect(g.stride);
    args.collect(g.padding);
    args.collect(g.dilation);
    args.collect(g.output_padding);
    args.collect(g.transposed);
    args.collect(g.groups);
    args.collect(bias_);
  }

  variable_list apply_with_saved(const variable_list& given, torch::dynamo::autograd::SwapSavedVariables& saved) override {
    saved.before(x_);
    saved.before(w_);
    const Mask mask = {task_should_compute_output(0), task_should_compute_output(1), task_should_compute_output(2)};
    variable_list grads(3);
    if (given[0].defined())
      grads = by_torch(given[0], x_.unpack(), w_.unpack(), mask);
    saved.after(x_);
    saved.after(w_);
    return grads;
  }
};

// Nodes are counted by one pointer or another, as the version of torch has it.
template <class Pointer>
Pointer made(PyObject* owner, const Tensor& x, const Tensor& w, const Tensor& b) {
  if constexpr (std::is_constructible_v<Pointer, Node*, void (*)(Node*)>)
    return Pointer(new PlannedConvBackward(owner, x, w, b), [](Node* node) { delete node; });
  else
    return c10::make_intrusive<PlannedConvBackward>(owner, x, w, b);
}

// --- Forward ---------------------------------------------------------------------------------------------------------

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

PyObject* planned_call(PyObject* object, PyObject* const* arguments, size_t flags, PyObject* names) {
  HANDLE_TH_ERRORS
  PlannedCall* self = reinterpret_cast<PlannedCall*>(object);
  TORCH_CHECK_TYPE(PyVectorcall_NARGS(flags) == 3 && !names && THPVariable_Check(arguments[0]) && THPVariable_Check(arguments[1]),
                   "a planned call takes an input, a weight, and a bias or None");
  TORCH_CHECK(self->backward, "the planned call was cleared: it is no longer in use");
  const Tensor x = cast(self, THPVariable_Unpack(arguments[0])), w = cast(self, THPVariable_Unpack(arguments[1]));
  const Tensor b = arguments[2] == Py_None ? Tensor() : cast(self, THPVariable_Unpack(arguments[2]));
  const c10::impl::ExcludeDispatchKeyGuard without_autocast(c10::autocast_dispatch_keyset);
  const c10::OptionalDeviceGuard device(x.device());
  const Tensor y = computed(self, x, w, b);
  if (at::GradMode::is_enabled() && (x.requires_grad() || w.requires_grad() || (b.defined() && b.requires_grad()))) {
    NodePointer node = made<NodePointer>(object, x, w, b);
    node->set_next_edges(torch::autograd::collect_next_edges(x, w, b));
    torch::autograd::set_history(y, node);
  }
  return THPVariable_Wrap(y);
  END_HANDLE_TH_ERRORS
}

// --- Making one ------------------------------------------------------------------------------------------------------

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

PyObject* planned_new(PyTypeObject* type, PyObject* args, PyObject* kwargs) {
  static const char* names[] = {"forward", "grad_input", "grad_weight", "backward", "geometry", "strides", "misaligned", "autocast", nullptr};
  PyObject *forward, *grad_input, *grad_weight, *backward, *sides[4], *strides[3];
  int transposed;
  long long groups, misaligned, autocast;
  if (!PyArg_ParseTupleAndKeywords(args, kwargs, "OOOO(OOOOpL)(OOO)LL:PlannedCall", const_cast<char**>(names), &forward,
                                   &grad_input, &grad_weight, &backward, &sides[0], &sides[1], &sides[2], &sides[3], &transposed,
                                   &groups, &strides[0], &strides[1], &strides[2], &misaligned, &autocast))
    return nullptr;
  auto geometry = std::make_unique<Geometry>();
  geometry->transposed = transposed;
  geometry->groups = groups;
  Ints* into[4] = {&geometry->stride, &geometry->padding, &geometry->dilation, &geometry->output_padding};
  std::unique_ptr<Ints> expected[3];
  for (int i = 0; i < 4; i++)
    if (!read_ints(sides[i], *into[i]))
      return nullptr;
  for (int i = 0; i < 3; i++)
    if (expected[i] = std::make_unique<Ints>(); !read_ints(strides[i], *expected[i]))
      return nullptr;
  PlannedCall* self = reinterpret_cast<PlannedCall*>(type->tp_alloc(type, 0));
  if (!self)
    return nullptr;
  self->vectorcall = planned_call;
  self->forward = forward == Py_None ? nullptr : Py_NewRef(forward);
  self->grad_input = grad_input == Py_None ? nullptr : Py_NewRef(grad_input);
  self->grad_weight = grad_weight == Py_None ? nullptr : Py_NewRef(grad_weight);
  self->backward = Py_NewRef(backward);
  self->geometry = geometry.release();
  self->gradient_strides = expected[0].release();
  self->x_strides = expected[1].release();
  self->w_strides = expected[2].release();
  self->misaligned = misaligned;
  self->autocast = autocast;
  return reinterpret_cast<PyObject*>(self);
}

int planned_traverse(PyObject* object, visitproc visit, void* arg) {
  PlannedCall* self = reinterpret_cast<PlannedCall*>(object);
  Py_VISIT(self->forward);
  Py_VISIT(self->grad_input);
  Py_VISIT(self->grad_weight);
  Py_VISIT(self->backward);
  return 0;
}

int planned_clear(PyObject* object) {
  PlannedCall* self = reinterpret_cast<PlannedCall*>(object);
  Py_CLEAR(self->forward);
  Py_CLEAR(self->grad_input);
  Py_CLEAR(self->grad_weight);
  Py_CLEAR(self->backward);
  return 0;
}

void planned_dealloc(PyObject* object) {
  PlannedCall* self = reinterpret_cast<PlannedCall*>(object);
  PyObject_GC_UnTrack(object);
  planned_clear(object);
  delete self->geometry;
  delete self->gradient_strides;
  delete self->x_strides;
  delete self->w_strides;
  Py_TYPE(object)->tp_free(object);
}

PyTypeObject PlannedCallType = [] {
  PyTypeObject type = {PyVarObject_HEAD_INIT(nullptr, 0)};
  type.tp_name = "planned_call.PlannedCall";
  type.tp_doc = "PlannedCall(forward, grad_input, grad_weight, backward, geometry, strides, misaligned, autocast)";
  type.tp_basicsize = sizeof(PlannedCall);
  type.tp_flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC | Py_TPFLAGS_HAVE_VECTORCALL;
  type.tp_vectorcall_offset = offsetof(PlannedCall, vectorcall);
  type.tp_call = PyVectorcall_Call;
  type.tp_new = planned_new;
  type.tp_dealloc = planned_dealloc;
  type.tp_traverse = planned_traverse;
  type.tp_clear = planned_clear;
  return type;
}();

PyModuleDef module = {PyModuleDef_HEAD_INIT, "planned_call", "Calls of planned layers with autograd.", -1, nullptr, nullptr, nullptr, nullptr, nullptr};

} // namespace

PyMODINIT_FUNC PyInit_planned_call() {
  static PyTypeObject node;
  if (PyType_Ready(&PlannedCallType) || !torch::autograd::_initFunctionPyTypeObject(node, "PlannedConvBackward", nullptr, nullptr))
    return nullptr;
  torch::autograd::registerCppFunction(typeid(PlannedConvBackward), &node); // what grad_fn shows of one
  PyObject* made_module = PyModule_Create(&module);
  if (made_module && PyModule_AddObjectRef(made_module, "PlannedCall", reinterpret_cast<PyObject*>(&PlannedCallType)))
    Py_CLEAR(made_module);
  return made_module;
}
