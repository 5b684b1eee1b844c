// PlannedConvBackward: what a planned call leaves in autograd's graph.

#pragma once

#include "passes.h"

#include <torch/csrc/autograd/functions/utils.h>
#include <torch/csrc/autograd/saved_variable.h>
#include <torch/csrc/dynamo/compiled_autograd.h>

#include <mutex>
#include <string>
#include <type_traits>

namespace {

using torch::autograd::SavedVariable;
using NodePointer = std::decay_t<decltype(std::declval<torch::autograd::Edge>().function)>;

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

  // The plans for a result's gradient that lies like this one, or null.
  const PlannedCall* plan_of(const Tensor& dy) const {
    const PlannedCall* plan = plans();
    while (plan && !fits(dy, *plan->gradient_strides, plan->misaligned))
      plan = reinterpret_cast<PlannedCall*>(plan->otherwise);
    return plan;
  }

  // All gradients by the function in Python, which looks at everything.
  variable_list by_python(const Tensor& dy, const Tensor& x, const Tensor& w, Mask mask) const {
    Locked lock;
    Reference tensors[3] = {wrapped(dy), wrapped(x), wrapped(w)};
    Reference asked = flags_of(mask);
    PyObject* arguments[4] = {tensors[0].get(), tensors[1].get(), tensors[2].get(), asked.get()};
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
    const PlannedCall* plan = plan_of(dy);
    const bool usual = plan && !at::GradMode::is_enabled() && is_undisturbed() && fits(x, *plan->x_strides, plan->misaligned) &&
        fits(w, *plan->w_strides, plan->misaligned);
    return usual ? gradients_by_plans(plan, dy, x, w, mask) : by_python(dy, x, w, mask);
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
      grads = gradients_by_torch(*plans()->geometry, given[0], x_.unpack(), w_.unpack(), bias_, mask);
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

} // namespace
