// RecurrentCall: one kind of call of a planned recurrent layer, with autograd, in one call of native code.
//
// It is for layers whose kernels run all steps of a direction in one launch, without dropout between layers and packed
// batches. Operands that lie otherwise than the kernels take them are left to Python.

#pragma once

#include "backward_node.h"
#include "recurrent_plan.h"

#include <ATen/core/dispatch/Dispatcher.h>

#include <string>

namespace {

struct RecurrentCall {
  PyObject_HEAD
  vectorcallfunc vectorcall;
  RecurrentPlan* plan;
  PyObject* backward;  // backward(operands, gradients, needs): all gradients by torch, differentiable themselves
  PyObject* precision; // precision(): whether torch's products have the precision of the plan's; or None
  std::string* cell;
};

// Whether torch's products have the plan's precision. The interpreter's lock is held.
bool has_precision(const RecurrentCall* self) {
  if (self->precision == Py_None)
    return true;
  const Reference answer(PyObject_CallNoArgs(self->precision));
  if (!answer.get())
    throw python_error();
  return answer.get() == Py_True;
}

// The gradients as compiled autograd traces them: by one operator of torch's own layer, which computes its forward again.
variable_list recurrent_traced(const RecurrentCall* call, std::vector<Tensor> operands, const variable_list& ends, const std::vector<bool>& needs) {
  using Gradients = std::vector<Tensor>(const c10::List<std::optional<Tensor>>&, const Tensor&, const Tensor&, const std::optional<Tensor>&,
                                        at::TensorList, at::TensorList, std::string_view, bool, int64_t, int64_t, double, at::ArrayRef<bool>);
  static const auto op = c10::Dispatcher::singleton().findSchemaOrThrow("tilewise::rnn_by_torch_backward", "").typed<Gradients>();
  const RecurrentPlan& p = *call->plan;
  const at::TensorOptions like = operands[0].options().requires_grad(std::nullopt);
  if (!operands[1].defined()) {
    operands[1] = at::zeros({p.ends(), p.batch, p.hidden}, like);
    if (p.lstm)
      operands[2] = at::zeros({p.ends(), p.batch, p.hidden}, like);
  }
  c10::List<std::optional<Tensor>> gradients;
  for (const Tensor& end : ends)
    gradients.push_back(end.defined() ? std::optional<Tensor>(end) : std::nullopt);
  const std::vector<Tensor> weights(operands.begin() + 3, operands.end()), graph = {at::empty({0}, like.dtype(at::kByte))};
  const auto flags = std::make_unique<bool[]>(needs.size());
  for (size_t i = 0; i < needs.size(); i++)
    flags[i] = needs[i];
  const std::vector<Tensor> found =
      op.call(gradients, operands[0], operands[1], p.lstm ? std::optional<Tensor>(operands[2]) : std::nullopt, weights, graph, *call->cell,
              p.biases, p.layers, p.directions, 0.0, at::ArrayRef<bool>(flags.get(), needs.size()));
  variable_list grads(operands.size());
  auto next = found.begin();
  for (size_t i = 0; i < needs.size(); i++)
    if (needs[i] && next != found.end())
      grads[i] = *next++;
  return grads;
}

struct PlannedRecurrentBackward : public Node {
  PyObject* call_; // a RecurrentCall, owned
  std::vector<SavedVariable> operands_, kept_;
  std::vector<bool> given_; // which operands are there

  PlannedRecurrentBackward(PyObject* owner, const std::vector<Tensor>& operands, const std::vector<Tensor>& kept) : call_(Py_NewRef(owner)) {
    for (const Tensor& t : operands) {
      operands_.emplace_back(t, false);
      given_.push_back(t.defined());
    }
    for (const Tensor& t : kept)
      kept_.emplace_back(t, false);
  }

  ~PlannedRecurrentBackward() override {
    if (!Py_IsInitialized())
      return; // the process ends
    Locked lock;
    Py_DECREF(call_);
  }

  std::string name() const override {
    return "PlannedRecurrentBackward";
  }

  void release_variables() override {
    std::lock_guard<std::mutex> lock(mutex_);
    for (std::vector<SavedVariable>* all : {&operands_, &kept_})
      for (SavedVariable& one : *all)
        one.reset_data();
  }

  const RecurrentCall* call() const {
    return reinterpret_cast<RecurrentCall*>(call_);
  }

  static std::vector<Tensor> unpacked(const std::vector<SavedVariable>& saved) {
    std::vector<Tensor> found;
    for (const SavedVariable& one : saved)
      found.push_back(one.unpack());
    return found;
  }

  std::vector<bool> needs() const {
    std::vector<bool> asked;
    for (size_t i = 0; i < operands_.size(); i++)
      asked.push_back(given_[i] && task_should_compute_output(i));
    return asked;
  }

  // All gradients by the function in Python.
  variable_list by_python(const std::vector<Tensor>& operands, const variable_list& ends, const std::vector<bool>& asked) const {
    Locked lock;
    const auto listed = [](const std::vector<Tensor>& tensors) {
      Reference list(PyList_New(static_cast<Py_ssize_t>(tensors.size())));
      for (size_t i = 0; list.get() && i < tensors.size(); i++)
        PyList_SET_ITEM(list.get(), static_cast<Py_ssize_t>(i), Py_NewRef(wrapped(tensors[i]).get()));
      return list;
    };
    const Reference given = listed(operands), gradients = listed(ends), needed(PyList_New(static_cast<Py_ssize_t>(asked.size())));
    if (!given.get() || !gradients.get() || !needed.get())
      throw python_error();
    for (size_t i = 0; i < asked.size(); i++)
      PyList_SET_ITEM(needed.get(), static_cast<Py_ssize_t>(i), PyBool_FromLong(asked[i]));
    TORCH_CHECK(call()->backward, "the planned call was cleared: it is no longer in use");
    PyObject* arguments[3] = {given.get(), gradients.get(), needed.get()};
    const Reference found(PyObject_Vectorcall(call()->backward, arguments, 3, nullptr));
    if (!found.get())
      throw python_error();
    TORCH_CHECK_TYPE(PyTuple_Check(found.get()) && PyTuple_GET_SIZE(found.get()) == static_cast<Py_ssize_t>(operands.size()),
                     "backward gave no gradient for each operand");
    variable_list grads(operands.size());
    for (size_t i = 0; i < grads.size(); i++)
      if (PyObject* grad = PyTuple_GET_ITEM(found.get(), static_cast<Py_ssize_t>(i)); grad != Py_None)
        grads[i] = THPVariable_Unpack(grad);
    return grads;
  }

  variable_list apply(variable_list&& ends) override {
    std::lock_guard<std::mutex> lock(mutex_);
    const std::vector<bool> asked = needs();
    const std::vector<Tensor> operands = unpacked(operands_);
    bool usual = !at::GradMode::is_enabled() && is_undisturbed(), any = false;
    for (const Tensor& end : ends) {
      any = any || end.defined();
      usual = usual && (!end.defined() || (end.scalar_type() == operands[0].scalar_type() && fits(end, end.strides().vec(), 0)));
    }
    if (!any)
      return variable_list(operands.size());
    if (!usual)
      return by_python(operands, ends, asked);
    const std::vector<Tensor> kept = unpacked(kept_);
    const c10::impl::ExcludeDispatchKeyGuard without_autocast(c10::autocast_dispatch_keyset);
    const c10::OptionalDeviceGuard device(operands[0].device());
    Locked python;
    return has_precision(call()) ? recurrent_gradients(*call()->plan, operands, kept, ends, asked) : by_python(operands, ends, asked);
  }

  // Compiled autograd traces backward as torch computes it.
  void compiled_args(torch::dynamo::autograd::CompiledNodeArgs& args) const override {
    const RecurrentPlan& p = *call()->plan;
    for (const SavedVariable& one : operands_)
      args.collect(one, false);
    for (const bool one : given_)
      args.collect(one);
    args.collect(*call()->cell);
    args.collect(p.biases);
    args.collect(p.layers);
    args.collect(p.directions);
    args.collect(p.hidden);
  }

  variable_list apply_with_saved(const variable_list& ends, torch::dynamo::autograd::SwapSavedVariables& saved) override {
    for (SavedVariable& one : operands_)
      saved.before(one);
    const bool any = std::any_of(ends.begin(), ends.end(), [](const Tensor& end) { return end.defined(); });
    variable_list grads = any ? recurrent_traced(call(), unpacked(operands_), ends, needs()) : variable_list(operands_.size());
    for (SavedVariable& one : operands_)
      saved.after(one);
    return grads;
  }
};

// Nodes are counted by one pointer or another, as the version of torch has it.
template <class Pointer>
Pointer made_recurrent(PyObject* owner, const std::vector<Tensor>& operands, const std::vector<Tensor>& kept) {
  if constexpr (std::is_constructible_v<Pointer, Node*, void (*)(Node*)>)
    return Pointer(new PlannedRecurrentBackward(owner, operands, kept), [](Node* node) { delete node; });
  else
    return c10::make_intrusive<PlannedRecurrentBackward>(owner, operands, kept);
}

// call(x, h0, c0, weights): (y, hn) or (y, hn, cn), or None where operands do not lie as the kernels take them.
PyObject* recurrent_call(PyObject* object, PyObject* const* arguments, size_t flags, PyObject* names) {
  HANDLE_TH_ERRORS
  const RecurrentCall* self = reinterpret_cast<const RecurrentCall*>(object);
  TORCH_CHECK_TYPE(PyVectorcall_NARGS(flags) == 4 && !names && PyTuple_Check(arguments[3]),
                   "a planned call takes x, h0 and c0 or None, and a tuple of weights");
  TORCH_CHECK(self->backward, "the planned call was cleared: it is no longer in use");
  const RecurrentPlan& p = *self->plan;
  std::vector<Tensor> operands(3);
  for (size_t i = 0; i < 3; i++)
    if (arguments[i] != Py_None)
      operands[i] = THPVariable_Unpack(arguments[i]);
  for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(arguments[3]); i++)
    operands.push_back(THPVariable_Unpack(PyTuple_GET_ITEM(arguments[3], i)));
  if (operands.size() != p.operands() || !operands[0].defined() || !all_dense(p, operands) || !has_precision(self))
    return Py_NewRef(Py_None);
  const c10::impl::ExcludeDispatchKeyGuard without_autocast(c10::autocast_dispatch_keyset);
  const c10::OptionalDeviceGuard device(operands[0].device());
  RecurrentResults found;
  {
    const at::NoGradGuard without_gradients;
    found = recurrent_results(p, operands);
    if (p.trains)
      found.y = p.copies ? found.y.clone() : found.y.detach();
  }
  std::vector<Tensor> results = {found.y, found.hn};
  if (p.lstm)
    results.push_back(found.cn);
  if (p.trains) {
    NodePointer node = made_recurrent<NodePointer>(object, operands, found.kept);
    torch::autograd::edge_list edges;
    for (const Tensor& t : operands)
      edges.push_back(t.defined() ? torch::autograd::impl::gradient_edge(t) : torch::autograd::Edge());
    node->set_next_edges(std::move(edges));
    torch::autograd::set_history(results, node);
  }
  Reference tuple(PyTuple_New(static_cast<Py_ssize_t>(results.size())));
  for (size_t i = 0; tuple.get() && i < results.size(); i++)
    PyTuple_SET_ITEM(tuple.get(), static_cast<Py_ssize_t>(i), Py_NewRef(wrapped(results[i]).get()));
  return tuple.get() ? Py_NewRef(tuple.get()) : nullptr;
  END_HANDLE_TH_ERRORS
}

// --- Making one ------------------------------------------------------------------------------------------------------

bool read_steps(PyObject* given, std::array<Steps, 2>& into, int64_t directions) {
  if (!PyTuple_Check(given) || PyTuple_GET_SIZE(given) != directions) {
    PyErr_Format(PyExc_ValueError, "steps=%R: one for each of %lld directions would do", given, static_cast<long long>(directions));
    return false;
  }
  for (int64_t i = 0; i < directions; i++)
    if (!into[static_cast<size_t>(i)].read(PyTuple_GET_ITEM(given, static_cast<Py_ssize_t>(i))))
      return false;
  return true;
}

PyObject* recurrent_new(PyTypeObject* type, PyObject* args, PyObject* kwargs) {
  HANDLE_TH_ERRORS
  static const char* names[] = {"cell", "sizes", "biases", "trains", "copies", "dtype", "forward", "grads", "backward", "precision", nullptr};
  auto plan = std::make_unique<RecurrentPlan>();
  const char* cell;
  long long sizes[7];
  int biases, trains, copies, dtype;
  PyObject *forward, *grads, *backward, *precision;
  if (!PyArg_ParseTupleAndKeywords(args, kwargs, "s(LLLLLLL)pppiOOOO:RecurrentCall", const_cast<char**>(names), &cell, &sizes[0], &sizes[1],
                                   &sizes[2], &sizes[3], &sizes[4], &sizes[5], &sizes[6], &biases, &trains, &copies, &dtype, &forward,
                                   &grads, &backward, &precision))
    return nullptr;
  int64_t* into[7] = {&plan->time, &plan->batch, &plan->inputs, &plan->hidden, &plan->layers, &plan->directions, &plan->gates};
  for (size_t i = 0; i < 7; i++)
    if ((*into[i] = sizes[i]) < 1)
      return PyErr_Format(PyExc_ValueError, "sizes: number %zu is %lld, at least 1 would do", i, sizes[i]);
  if (plan->directions > 2)
    return PyErr_Format(PyExc_ValueError, "sizes: %lld directions, 1 or 2 would do", sizes[5]);
  plan->biases = biases;
  plan->trains = trains;
  plan->copies = copies;
  plan->dtype = static_cast<at::ScalarType>(dtype);
  plan->lstm = !strcmp(cell, "lstm");
  plan->gru = !strcmp(cell, "gru");
  if (!read_steps(forward, plan->forward, plan->directions) || (trains && !read_steps(grads, plan->backward, plan->directions)))
    return nullptr;
  RecurrentCall* self = reinterpret_cast<RecurrentCall*>(type->tp_alloc(type, 0));
  if (!self)
    return nullptr;
  self->vectorcall = recurrent_call;
  self->plan = plan.release();
  self->backward = Py_NewRef(backward);
  self->precision = Py_NewRef(precision);
  self->cell = new std::string(cell);
  return reinterpret_cast<PyObject*>(self);
  END_HANDLE_TH_ERRORS
}

int recurrent_traverse(PyObject* object, visitproc visit, void* arg) {
  RecurrentCall* self = reinterpret_cast<RecurrentCall*>(object);
  Py_VISIT(self->backward);
  Py_VISIT(self->precision);
  if (!self->plan)
    return 0;
  for (const auto* all : {&self->plan->forward, &self->plan->backward})
    for (const Steps& one : *all)
      if (const int found = one.traverse(visit, arg))
        return found;
  return 0;
}

int recurrent_clear(PyObject* object) {
  RecurrentCall* self = reinterpret_cast<RecurrentCall*>(object);
  Py_CLEAR(self->backward);
  if (self->plan)
    for (auto* all : {&self->plan->forward, &self->plan->backward})
      for (Steps& one : *all)
        one.clear();
  return 0;
}

void recurrent_dealloc(PyObject* object) {
  PyObject_GC_UnTrack(object);
  recurrent_clear(object);
  RecurrentCall* self = reinterpret_cast<RecurrentCall*>(object);
  Py_XDECREF(self->precision);
  delete self->plan;
  delete self->cell;
  Py_TYPE(object)->tp_free(object);
}

PyTypeObject RecurrentCallType = [] {
  PyTypeObject type = {PyVarObject_HEAD_INIT(nullptr, 0)};
  type.tp_name = "planned_call.RecurrentCall";
  type.tp_doc = "RecurrentCall(cell, sizes, biases, trains, copies, dtype, forward, grads, backward, precision)";
  type.tp_basicsize = sizeof(RecurrentCall);
  type.tp_flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC | Py_TPFLAGS_HAVE_VECTORCALL;
  type.tp_vectorcall_offset = offsetof(RecurrentCall, vectorcall);
  type.tp_call = PyVectorcall_Call;
  type.tp_new = recurrent_new;
  type.tp_dealloc = recurrent_dealloc;
  type.tp_traverse = recurrent_traverse;
  type.tp_clear = recurrent_clear;
  return type;
}();

} // namespace
