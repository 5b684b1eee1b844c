// PlannedCall: one kind of call of a planned layer, with autograd, in one call of native code.
//
// What it computes is what Runner in nn/layers/runner.py computes: passes by their plans, the others by torch. What it
// saves is the host's time: no Python runs between a call and its kernels, forward or backward, but for the plans'
// own calls. Whatever is unusual is handed to the functions in Python that it is given. LinearCall is the same for
// linear layers.

#include "alike_tensors.h"
#include "backward_node.h"
#include "linear_call.h"
#include "module_call.h"
#include "operators.h"
#include "passes.h"
#include "recurrent_call.h"

#include <torch/csrc/autograd/python_cpp_function.h>

#include <memory>

namespace {

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

PyObject* planned_new(PyTypeObject* type, PyObject* args, PyObject* kwargs) {
  static const char* names[] = {"forward", "grad_input", "grad_weight", "backward", "geometry", "strides", "misaligned", "autocast", "otherwise", nullptr};
  PyObject *forward, *grad_input, *grad_weight, *backward, *sides[4], *strides[3], *otherwise = Py_None;
  auto passes = std::make_unique<Passes>();
  int transposed;
  long long groups, misaligned, autocast;
  if (!PyArg_ParseTupleAndKeywords(args, kwargs, "OOOO(OOOOpL)(OOO)LL|O:PlannedCall", const_cast<char**>(names), &forward,
                                   &grad_input, &grad_weight, &backward, &sides[0], &sides[1], &sides[2], &sides[3], &transposed,
                                   &groups, &strides[0], &strides[1], &strides[2], &misaligned, &autocast, &otherwise))
    return nullptr;
  if (otherwise != Py_None && Py_TYPE(otherwise) != &PlannedCallType)
    return PyErr_Format(PyExc_TypeError, "otherwise=%R: None or a planned call would do", otherwise);
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
  if (!passes->forward.read(forward) || !passes->grad_input.read(grad_input) || !passes->grad_weight.read(grad_weight))
    return nullptr;
  PlannedCall* self = reinterpret_cast<PlannedCall*>(type->tp_alloc(type, 0));
  if (!self)
    return nullptr;
  self->vectorcall = planned_call;
  self->passes = passes.release();
  self->backward = Py_NewRef(backward);
  self->otherwise = otherwise == Py_None ? nullptr : Py_NewRef(otherwise);
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
  Py_VISIT(self->backward);
  Py_VISIT(self->otherwise);
  if (!self->passes)
    return 0;
  for (const Pass* pass : {&self->passes->forward, &self->passes->grad_input, &self->passes->grad_weight})
    if (const int found = pass->traverse(visit, arg))
      return found;
  return 0;
}

int planned_clear(PyObject* object) {
  PlannedCall* self = reinterpret_cast<PlannedCall*>(object);
  Py_CLEAR(self->backward);
  if (self->passes)
    for (Pass* pass : {&self->passes->forward, &self->passes->grad_input, &self->passes->grad_weight})
      pass->clear();
  return 0;
}

void planned_dealloc(PyObject* object) {
  PlannedCall* self = reinterpret_cast<PlannedCall*>(object);
  PyObject_GC_UnTrack(object);
  planned_clear(object);
  Py_XDECREF(self->otherwise);
  delete self->passes;
  delete self->geometry;
  delete self->gradient_strides;
  delete self->x_strides;
  delete self->w_strides;
  Py_TYPE(object)->tp_free(object);
}

PyTypeObject PlannedCallType = [] {
  PyTypeObject type = {PyVarObject_HEAD_INIT(nullptr, 0)};
  type.tp_name = "planned_call.PlannedCall";
  type.tp_doc = "PlannedCall(forward, grad_input, grad_weight, backward, geometry, strides, misaligned, autocast, otherwise=None)";
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

PyMethodDef functions[] = {
    {"implement", implement, METH_VARARGS, "implement(conv, conv_backward, precision, keys): compute the operators at these dispatch keys."},
    {"publish", publish, METH_VARARGS, "publish(name, call, x_shape, w_shape, bias, deterministic, precision): let the operators find a call."},
    {nullptr, nullptr, 0, nullptr},
};

PyModuleDef module = {PyModuleDef_HEAD_INIT, "planned_call", "Calls of planned layers with autograd.", -1, functions, nullptr, nullptr, nullptr, nullptr};

} // namespace

PyMODINIT_FUNC PyInit_planned_call() {
  static PyTypeObject node, linear_node, recurrent_node;
  parameters_name = PyUnicode_InternFromString("_parameters");
  weight_name = PyUnicode_InternFromString("weight");
  bias_name = PyUnicode_InternFromString("bias");
  if (!parameters_name || !weight_name || !bias_name || PyType_Ready(&ModuleCallType) || PyType_Ready(&PlannedCallType) || PyType_Ready(&LinearCallType) || PyType_Ready(&RecurrentCallType) || PyType_Ready(&AlikeTensorsType) || !torch::autograd::_initFunctionPyTypeObject(node, "PlannedConvBackward", nullptr, nullptr) ||
      !torch::autograd::_initFunctionPyTypeObject(linear_node, "PlannedLinearBackward", nullptr, nullptr) ||
      !torch::autograd::_initFunctionPyTypeObject(recurrent_node, "PlannedRecurrentBackward", nullptr, nullptr))
    return nullptr;
  torch::autograd::registerCppFunction(typeid(PlannedConvBackward), &node); // what grad_fn shows of one
  torch::autograd::registerCppFunction(typeid(PlannedLinearBackward), &linear_node);
  torch::autograd::registerCppFunction(typeid(PlannedRecurrentBackward), &recurrent_node);
  PyObject* made_module = PyModule_Create(&module);
  if (made_module && (PyModule_AddObjectRef(made_module, "PlannedCall", reinterpret_cast<PyObject*>(&PlannedCallType)) ||
                      PyModule_AddObjectRef(made_module, "LinearCall", reinterpret_cast<PyObject*>(&LinearCallType)) ||
                      PyModule_AddObjectRef(made_module, "RecurrentCall", reinterpret_cast<PyObject*>(&RecurrentCallType)) ||
                      PyModule_AddObjectRef(made_module, "AlikeTensors", reinterpret_cast<PyObject*>(&AlikeTensorsType)) ||
                      PyModule_AddObjectRef(made_module, "ModuleCall", reinterpret_cast<PyObject*>(&ModuleCallType))))
    Py_CLEAR(made_module);
  return made_module;
}
