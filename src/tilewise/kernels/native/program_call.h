// NativeProgram: a list of steps that runs without Python between them.

#pragma once

#include "step_operators.h"
#include "step_team.h"

#include <ATen/autocast_mode.h>
#include <ATen/core/grad_mode.h>
#include <c10/core/impl/LocalDispatchKeySet.h>

#include <variant>

namespace {

// A step in Python, called with the interpreter's lock.
struct PythonStep {
  THPObjectPtr run;
  std::vector<int64_t> inputs;
};

struct Code {
  std::variant<LaunchStep, OperatorStep, PythonStep> step;
  int64_t output; // the value that it gives; -1 for a launch and for an operator whose result is of no use
  bool is_new;    // it returns the value, rather than writing into it
};

struct List {
  std::vector<Value> values;
  std::vector<Code> code;
  std::vector<int64_t> inputs, outputs;
  std::vector<size_t> fresh, changing;
  std::vector<std::string> notes; // what is said of an error, one for each step
  int64_t arena_bytes = 0;
  size_t kept = 0, most_words = 0;
  OpenMP openmp;
  std::vector<std::unique_ptr<Frame>> frames; // of calls that are over; used with the interpreter's lock
};

struct NativeProgram {
  PyObject_HEAD
  vectorcallfunc vectorcall;
  List* list;
};

// The interpreter's lock, which is given up for native steps and held again at the end, whatever happens.
class Interpreter {
 public:
  void leave() {
    if (!saved_)
      saved_ = PyEval_SaveThread();
  }
  void enter() {
    if (saved_)
      PyEval_RestoreThread(std::exchange(saved_, nullptr));
  }
  Interpreter() = default;
  Interpreter(const Interpreter&) = delete;
  Interpreter& operator=(const Interpreter&) = delete;
  ~Interpreter() {
    enter();
  }

 private:
  PyThreadState* saved_ = nullptr;
};

// A frame that no other call uses, given back at the end. Both with the interpreter's lock.
class Borrowed {
 public:
  explicit Borrowed(List& list) : list_(list) {
    if (list.frames.empty()) {
      frame_ = std::make_unique<Frame>(list.values, list.arena_bytes, list.most_words);
    } else {
      frame_ = std::move(list.frames.back());
      list.frames.pop_back();
    }
  }
  Borrowed(const Borrowed&) = delete;
  Borrowed& operator=(const Borrowed&) = delete;
  ~Borrowed() {
    for (size_t index : list_.changing)
      frame_->values[index].reset();
    if (list_.frames.size() < list_.kept)
      list_.frames.push_back(std::move(frame_));
  }
  Frame& operator*() {
    return *frame_;
  }

 private:
  List& list_;
  std::unique_ptr<Frame> frame_;
};

std::string text_of(const Tensor& t) {
  std::ostringstream text;
  text << c10::toString(t.scalar_type()) << " " << t.sizes() << " with strides ";
  if (t.layout() == at::kStrided)
    text << t.strides();
  else
    text << "of its own layout";
  return text.str();
}

void put_returned(const List& list, Frame& frame, int64_t output, Tensor found) {
  const Value& value = list.values[output];
  TORCH_CHECK_VALUE(value.has(found), "the step returned ", text_of(found), ": ", c10::toString(value.dtype), " ", value.shape, " with strides ", value.strides, " would do");
  frame.set(output, std::move(found));
}

void run_python(const List& list, Frame& frame, const Code& code, PythonStep& step) {
  std::vector<THPObjectPtr> held;
  std::vector<PyObject*> given;
  for (int64_t input : step.inputs)
    held.emplace_back(THPVariable_Wrap(frame.values[input]));
  if (!code.is_new)
    held.emplace_back(THPVariable_Wrap(frame.values[code.output]));
  for (THPObjectPtr& tensor : held) {
    if (!tensor)
      throw python_error();
    given.push_back(tensor.get());
  }
  THPObjectPtr found(PyObject_Vectorcall(step.run.get(), given.data(), given.size(), nullptr));
  if (!found)
    throw python_error();
  if (!code.is_new)
    return;
  TORCH_CHECK_TYPE(THPVariable_Check(found.get()), "the step returned a ", Py_TYPE(found.get())->tp_name, ": a tensor would do");
  put_returned(list, frame, code.output, THPVariable_Unpack(found.get()));
}

// Run the launches from `first` on that follow each other, those that have begun before `until`. Returns the step behind.
size_t run_launches(const List& list, Frame& frame, size_t first, Clock::time_point until, Times* times) {
  const int most = at::get_num_threads();
  std::vector<Ready> ready;
  int64_t* words = frame.words.data();
  bool divided = false;
  for (size_t at = first; at < list.code.size(); at++) {
    const LaunchStep* launch = std::get_if<LaunchStep>(&list.code[at].step);
    if (!launch)
      break;
    ready.push_back({launch->worker, words, launch->put(frame, words, most)});
    divided = divided || ready.back().divided;
    words += launch->words.size();
  }
  if (divided) // by all of torch's threads: a smaller team would make OpenMP end those that are not in it
    return first + Team::run(ready, list.openmp, until, times);
  for (const Ready& launch : ready) {
    launch.worker(launch.words);
    if (times)
      times->push_back(Clock::now());
  }
  return first + ready.size();
}

// Run all steps. `at` is the step in progress. When the first began and each ended is added to `times`, if there are any.
void run_steps(List& list, Frame& frame, size_t* at, Times* times) {
  constexpr std::chrono::milliseconds patience(50); // before it is asked whether the user has interrupted
  Interpreter interpreter;
  Clock::time_point asked = Clock::now();
  if (times)
    times->push_back(asked);
  for (*at = 0; *at < list.code.size();) {
    Code& code = list.code[*at];
    const size_t told = times ? times->size() : 0;
    if (std::holds_alternative<LaunchStep>(code.step)) {
      interpreter.leave();
      *at = run_launches(list, frame, *at, asked + patience, times);
    } else if (const OperatorStep* step = std::get_if<OperatorStep>(&code.step)) {
      interpreter.leave();
      Tensor found = step->call(frame, code.is_new);
      if (code.is_new)
        put_returned(list, frame, code.output, std::move(found));
      ++*at;
    } else {
      interpreter.enter();
      run_python(list, frame, code, std::get<PythonStep>(code.step));
      ++*at;
    }
    const Clock::time_point now = Clock::now();
    if (times && times->size() == told)
      times->push_back(now);
    if (now - asked > patience) {
      interpreter.enter();
      if (PyErr_CheckSignals())
        throw python_error();
      asked = now;
    }
  }
}

PyObject* outputs_of(const List& list, Frame& frame) {
  std::vector<THPObjectPtr> found;
  for (int64_t output : list.outputs) {
    Tensor result = frame.values[output];
    if (frame.holds(result)) { // a step returned a view of it
      Tensor copy = at::detail::empty_strided_cpu(result.sizes(), result.strides(), result.scalar_type());
      const at::AutoDispatchBelowADInplaceOrView without_gradients;
      copy.copy_(result);
      result = std::move(copy);
    }
    found.emplace_back(THPVariable_Wrap(std::move(result)));
    if (!found.back())
      return nullptr;
  }
  if (found.size() == 1)
    return found[0].release();
  PyObject* all = PyTuple_New(static_cast<Py_ssize_t>(found.size()));
  for (size_t i = 0; all && i < found.size(); i++)
    PyTuple_SET_ITEM(all, static_cast<Py_ssize_t>(i), found[i].release());
  return all;
}

// Whether the call is one that the list is for: what else there is, Python looks at.
bool fits(const List& list, PyObject* const* arguments, Py_ssize_t count) {
  if (count != static_cast<Py_ssize_t>(list.inputs.size()))
    return false;
  for (Py_ssize_t i = 0; i < count; i++)
    if (!(THPVariable_CheckExact(arguments[i]) || Py_TYPE(arguments[i]) == reinterpret_cast<PyTypeObject*>(ParameterClass)))
      return false;
    else if (const Tensor& given = THPVariable_Unpack(arguments[i]); !list.values[list.inputs[i]].has(given) || given.is_neg() || given.is_conj())
      return false;
  for (const Value& value : list.values)
    if (value.kind == Kind::constant && value.has_changed())
      return false;
  return true;
}

PyObject* run_call(List& list, PyObject* const* arguments, Py_ssize_t count, size_t* at, Times* times) {
  HANDLE_TH_ERRORS
  if (!fits(list, arguments, count))
    Py_RETURN_NOTIMPLEMENTED;
  const at::NoGradGuard no_gradients;
  const c10::impl::ExcludeDispatchKeyGuard without_autocast(c10::autocast_dispatch_keyset);
  Borrowed borrowed(list);
  Frame& frame = *borrowed;
  for (Py_ssize_t i = 0; i < count; i++)
    frame.set(list.inputs[i], THPVariable_Unpack(arguments[i]));
  for (size_t index : list.fresh)
    frame.set(index, at::detail::empty_strided_cpu(list.values[index].shape, list.values[index].strides, list.values[index].dtype));
  run_steps(list, frame, at, times);
  return outputs_of(list, frame);
  END_HANDLE_TH_ERRORS
}

// Add the note of the step in progress to the error that has been set.
void add_note(const std::string& note) {
  PyObject *type, *value, *trace;
  PyErr_Fetch(&type, &value, &trace);
  PyErr_NormalizeException(&type, &value, &trace);
  if (trace)
    PyException_SetTraceback(value, trace);
  THPObjectPtr done(PyObject_CallMethod(value, "add_note", "s", note.c_str()));
  if (!done)
    PyErr_Clear(); // the error itself matters more
  PyErr_Restore(type, value, trace);
}

PyObject* noted_call(List& list, PyObject* const* arguments, Py_ssize_t count, Times* times) {
  size_t at = list.code.size();
  PyObject* found = run_call(list, arguments, count, &at, times);
  if (!found && at < list.code.size())
    add_note(list.notes[at]);
  return found;
}

PyObject* program_call(PyObject* object, PyObject* const* arguments, size_t flags, PyObject* names) {
  if (names && PyTuple_GET_SIZE(names))
    return PyErr_Format(PyExc_TypeError, "a program takes its inputs without names");
  return noted_call(*reinterpret_cast<NativeProgram*>(object)->list, arguments, PyVectorcall_NARGS(flags), nullptr);
}

// What each step takes in nanoseconds; NotImplemented where a call would return that.
PyObject* program_times(PyObject* object, PyObject* const* arguments, Py_ssize_t count) {
  Times times;
  THPObjectPtr found(noted_call(*reinterpret_cast<NativeProgram*>(object)->list, arguments, count, &times));
  if (!found || found.get() == Py_NotImplemented)
    return found.release();
  THPObjectPtr taken(PyList_New(0));
  for (size_t i = 1; taken && i < times.size(); i++) {
    THPObjectPtr number(PyLong_FromLongLong(std::chrono::duration_cast<std::chrono::nanoseconds>(times[i] - times[i - 1]).count()));
    if (!number || PyList_Append(taken.get(), number.get()))
      return nullptr;
  }
  return taken.release();
}

} // namespace
