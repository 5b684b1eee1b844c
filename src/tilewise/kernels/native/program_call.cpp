// Makes a NativeProgram of what Python tells of its values and steps.

#include "program_call.h"
#include "usual_call.h"

namespace {

Ints ints(PyObject* tuple) {
  TORCH_CHECK_TYPE(PyTuple_Check(tuple), "a ", Py_TYPE(tuple)->tp_name, " is given: a tuple of integers would do");
  Ints numbers;
  for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(tuple); i++)
    numbers.push_back(whole(PyTuple_GET_ITEM(tuple, i)));
  return numbers;
}

// From (kind, dtype, shape, strides, root, offset in bytes, tensor or None).
Value value_of(PyObject* told, size_t index, const std::vector<Value>& before) {
  int kind;
  PyObject *dtype, *shape, *strides, *tensor;
  long long root, offset;
  if (!PyArg_ParseTuple(told, "iOOOLLO", &kind, &dtype, &shape, &strides, &root, &offset, &tensor))
    throw python_error();
  TORCH_CHECK_TYPE(THPDtype_Check(dtype), "value ", index, " has no dtype");
  Value value{static_cast<Kind>(kind), reinterpret_cast<THPDtype*>(dtype)->scalar_type, ints(shape), ints(strides), static_cast<size_t>(root), offset, {}, -1, nullptr, {}};
  TORCH_CHECK_VALUE(kind >= 0 && kind <= static_cast<int>(Kind::view) && value.shape.size() == value.strides.size() && offset >= 0, "value ", index, " is not as values are");
  const bool is_view = value.kind == Kind::view;
  TORCH_CHECK_VALUE(is_view ? value.root < before.size() && before[value.root].kind != Kind::view : value.root == index, "value ", index, " has the root ", root);
  if (value.kind == Kind::constant) {
    TORCH_CHECK_TYPE(THPVariable_Check(tensor), "value ", index, " is a constant without a tensor");
    value.tensor = THPVariable_Unpack(tensor);
    TORCH_CHECK_VALUE(value.has(value.tensor), "the tensor of value ", index, " does not lie as the value says");
    value.version = value.tensor.is_inference() ? -1 : value.tensor._version();
    value.data = value.tensor.const_data_ptr();
  }
  return value;
}

// From (kind of step, what it needs, output or -1, whether the output is new).
Code code_of(PyObject* told, size_t values) {
  const char* kind;
  PyObject* of;
  long long output;
  int is_new;
  if (!PyArg_ParseTuple(told, "sOLp", &kind, &of, &output, &is_new))
    throw python_error();
  TORCH_CHECK_VALUE(output >= -1 && output < static_cast<int64_t>(values), "a step gives value ", output);
  const std::string name(kind);
  if (name == "launch")
    return {launch_step(of, values), output, false};
  if (name == "operator")
    return {operator_step(of), output, is_new && output >= 0};
  TORCH_CHECK_VALUE(name == "python", "a step is of the kind ", name, ": launch, operator or python would do");
  PyObject *run, *inputs;
  if (!PyArg_ParseTuple(of, "OO", &run, &inputs))
    throw python_error();
  return {PythonStep{THPObjectPtr(Py_NewRef(run)), ints(inputs)}, output, is_new != 0};
}

void check_places(const List& list) {
  const int64_t count = static_cast<int64_t>(list.values.size());
  auto check = [&](int64_t place) { TORCH_CHECK_INDEX(place >= 0 && place < count, "value ", place, " of ", count); };
  for (int64_t place : list.inputs) {
    check(place);
    TORCH_CHECK_VALUE(list.values[place].kind == Kind::input, "value ", place, " is no input");
  }
  for (int64_t place : list.outputs)
    check(place);
  for (const Code& code : list.code) {
    if (const OperatorStep* step = std::get_if<OperatorStep>(&code.step)) {
      for (const Put& put : step->puts)
        for (int64_t place : put.values)
          check(std::max<int64_t>(place, 0));
    } else if (const PythonStep* python = std::get_if<PythonStep>(&code.step)) {
      check(code.output);
      for (int64_t place : python->inputs)
        check(place);
    }
  }
}

void index_values(List& list) {
  for (size_t i = 0; i < list.values.size(); i++) {
    const Value& value = list.values[i];
    if (value.kind == Kind::view)
      list.values[value.root].views.push_back(i);
    if (value.kind == Kind::fresh)
      list.fresh.push_back(i);
    const Kind kind = list.values[value.root].kind;
    if (kind == Kind::input || kind == Kind::fresh || kind == Kind::returned)
      list.changing.push_back(i);
    TORCH_CHECK_VALUE(value.kind != Kind::arena || value.offset + (value.shape.empty() ? 1 : 0) <= list.arena_bytes, "value ", i, " lies outside of the arena");
  }
}

PyObject* program_new(PyTypeObject* type, PyObject* args, PyObject* kwargs) {
  HANDLE_TH_ERRORS
  PyObject *values, *code, *inputs, *outputs, *notes;
  long long arena_bytes, kept;
  unsigned long long parallel, team_size;
  if ((kwargs && PyDict_GET_SIZE(kwargs)) ||
      !PyArg_ParseTuple(args, "O!O!O!O!O!LLKK", &PyTuple_Type, &values, &PyTuple_Type, &code, &PyTuple_Type, &inputs, &PyTuple_Type, &outputs, &PyTuple_Type, &notes, &arena_bytes, &kept, &parallel, &team_size))
    return nullptr;
  auto list = std::make_unique<List>();
  list->arena_bytes = arena_bytes;
  list->kept = static_cast<size_t>(kept);
  list->openmp = {reinterpret_cast<Parallel>(parallel), reinterpret_cast<TeamSize>(team_size)};
  TORCH_CHECK_VALUE(PyTuple_GET_SIZE(notes) == PyTuple_GET_SIZE(code) && list->openmp.parallel && list->openmp.size && arena_bytes >= 0 && kept >= 0, "a note for each step, and the addresses of OpenMP's functions, would do");
  for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(values); i++)
    list->values.push_back(value_of(PyTuple_GET_ITEM(values, i), static_cast<size_t>(i), list->values));
  size_t words = 0; // of the launches that follow each other
  for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(code); i++) {
    list->code.push_back(code_of(PyTuple_GET_ITEM(code, i), list->values.size()));
    const LaunchStep* launch = std::get_if<LaunchStep>(&list->code.back().step);
    words = launch ? words + launch->words.size() : 0;
    list->most_words = std::max(list->most_words, words);
    const char* note = PyUnicode_AsUTF8(PyTuple_GET_ITEM(notes, i));
    if (!note)
      return nullptr;
    list->notes.emplace_back(note);
  }
  list->inputs = ints(inputs);
  list->outputs = ints(outputs);
  check_places(*list);
  index_values(*list);
  NativeProgram* self = reinterpret_cast<NativeProgram*>(type->tp_alloc(type, 0));
  if (!self)
    return nullptr;
  self->vectorcall = program_call;
  self->list = list.release();
  return reinterpret_cast<PyObject*>(self);
  END_HANDLE_TH_ERRORS
}

int program_traverse(PyObject* object, visitproc visit, void* arg) {
  List* list = reinterpret_cast<NativeProgram*>(object)->list;
  if (list)
    for (Code& code : list->code)
      if (PythonStep* step = std::get_if<PythonStep>(&code.step))
        Py_VISIT(step->run.get());
  return 0;
}

int program_clear(PyObject* object) {
  NativeProgram* self = reinterpret_cast<NativeProgram*>(object);
  delete std::exchange(self->list, nullptr);
  return 0;
}

void program_dealloc(PyObject* object) {
  PyObject_GC_UnTrack(object);
  program_clear(object);
  Py_TYPE(object)->tp_free(object);
}

PyObject* program_release(PyObject* object, PyObject*) {
  reinterpret_cast<NativeProgram*>(object)->list->frames.clear();
  Py_RETURN_NONE;
}

PyObject* program_frames(PyObject* object, PyObject*) {
  return PyLong_FromSize_t(reinterpret_cast<NativeProgram*>(object)->list->frames.size());
}

PyMethodDef methods[] = {
    {"release", program_release, METH_NOARGS, "Free the arenas of calls that are over."},
    {"times", reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(program_times)), METH_FASTCALL, "Call it on its inputs, and return what each step took in nanoseconds."},
    {"frames", program_frames, METH_NOARGS, "How many arenas of calls that are over are kept."},
    {nullptr, nullptr, 0, nullptr},
};

PyTypeObject NativeProgramType = [] {
  PyTypeObject type = {PyVarObject_HEAD_INIT(nullptr, 0)};
  type.tp_name = "program_call.NativeProgram";
  type.tp_doc = "NativeProgram(values, code, inputs, outputs, notes, arena_bytes, kept, parallel, team_size): a list of steps, called on its inputs.";
  type.tp_basicsize = sizeof(NativeProgram);
  type.tp_flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC | Py_TPFLAGS_HAVE_VECTORCALL;
  type.tp_vectorcall_offset = offsetof(NativeProgram, vectorcall);
  type.tp_call = PyVectorcall_Call;
  type.tp_new = program_new;
  type.tp_dealloc = program_dealloc;
  type.tp_traverse = program_traverse;
  type.tp_clear = program_clear;
  type.tp_methods = methods;
  return type;
}();

PyModuleDef module = {PyModuleDef_HEAD_INIT, "program_call", "Lists of steps that run without Python between them.", -1, nullptr, nullptr, nullptr, nullptr, nullptr};

} // namespace

PyMODINIT_FUNC PyInit_program_call() {
  if (PyType_Ready(&NativeProgramType) || PyType_Ready(&UnchangedType) || PyType_Ready(&UsualCallType))
    return nullptr;
  PyObject* made = PyModule_Create(&module);
  if (made && (PyModule_AddObjectRef(made, "NativeProgram", reinterpret_cast<PyObject*>(&NativeProgramType)) ||
               PyModule_AddObjectRef(made, "Unchanged", reinterpret_cast<PyObject*>(&UnchangedType)) ||
               PyModule_AddObjectRef(made, "UsualCall", reinterpret_cast<PyObject*>(&UsualCallType))))
    Py_CLEAR(made);
  return made;
}
