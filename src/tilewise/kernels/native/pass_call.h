/* PassCall: one pass of a layer as one call, from tensors to queued kernels. launches.c says what it is for. */

#ifndef TILEWISE_PASS_CALL_H
#define TILEWISE_PASS_CALL_H

#include "launch_list.h"

enum {
    PASS_TENSORS = 4,  /* what a call takes: two operands, a bias or None, a result or None */
    MOST_ARGUMENTS = 8 /* of a function that makes a tensor */
};

/* A call of a Python function whose arguments are known: a tensor first, then `args`, the last of them named. */
typedef struct {
    PyObject *function, *args, *names;
} Maker;

typedef struct {
    PyObject_HEAD
    vectorcallfunc vectorcall;
    LaunchList *launches;
    PyObject *instead;   /* called with the same tensors where the list is left to Python */
    PyObject *stream;    /* stream(device): the current stream as an int */
    PyObject *device;    /* the number of the GPU */
    PyObject *data_ptr;  /* data_ptr(tensor): its address as an int */
    Maker result;        /* makes a result like the first operand */
    Maker workspace;     /* makes a workspace; its function is NULL where none is needed */
    PyObject *fit;       /* fit(bias or None, operand): the bias as kernels take it; NULL where they take none */
    PyObject *add;       /* add(result, bias): adds a bias that kernels do not */
} PassCall;

static PyObject *bias_name, *out_name;

/* Call a maker with `first`, or without it where that is NULL. */
static PyObject *make(const Maker *maker, PyObject *first)
{
    PyObject *all[MOST_ARGUMENTS + 1];
    const Py_ssize_t count = PyTuple_GET_SIZE(maker->args), named = PyTuple_GET_SIZE(maker->names);
    const Py_ssize_t start = first != NULL;
    all[0] = first;
    for (Py_ssize_t i = 0; i < count; i++)
        all[start + i] = PyTuple_GET_ITEM(maker->args, i);
    return PyObject_Vectorcall(maker->function, all, (size_t)(start + count - named), named ? maker->names : NULL);
}

/* The address of a tensor. Returns 0, or -1 with an error set. */
static int address_of(const PassCall *self, PyObject *tensor, uint64_t *address)
{
    PyObject *number = PyObject_Vectorcall(self->data_ptr, &tensor, 1, NULL);
    if (!number)
        return -1;
    const int failed = as_address(number, address);
    Py_DECREF(number);
    return failed;
}

/* Sort positional and named arguments into `tensors`, as `def call(a, b, bias=None, out=None)` does. */
static int read_tensors(PyObject *const *args, Py_ssize_t count, PyObject *names, PyObject *tensors[PASS_TENSORS])
{
    if (count < 2 || count > PASS_TENSORS) {
        PyErr_Format(PyExc_TypeError, "%zd arguments given: two operands, a bias and a result would do", count);
        return -1;
    }
    tensors[2] = tensors[3] = Py_None;
    for (Py_ssize_t i = 0; i < count; i++)
        tensors[i] = args[i];
    for (Py_ssize_t i = 0; names && i < PyTuple_GET_SIZE(names); i++) {
        PyObject *name = PyTuple_GET_ITEM(names, i);
        const int place = PyUnicode_Compare(name, bias_name) == 0 ? 2 : PyUnicode_Compare(name, out_name) == 0 ? 3 : -1;
        if (place < count) {
            PyErr_Format(PyExc_TypeError, "argument %R: bias or out would do, each once", name);
            return -1;
        }
        tensors[place] = args[count + i];
    }
    return 0;
}

/* Take all addresses and queue the launches. `held` gets what must live until then. */
static int compute(PassCall *self, PyObject *tensors[PASS_TENSORS], PyObject *held[2])
{
    uint64_t addresses[MOST_SOURCES] = {0}, stream;
    if (self->workspace.function && !(held[0] = make(&self->workspace, NULL)))
        return -1;
    if (self->fit) {
        PyObject *pair[2] = {tensors[2], tensors[0]};
        if (!(held[1] = PyObject_Vectorcall(self->fit, pair, 2, NULL)))
            return -1;
    }
    if (address_of(self, tensors[0], &addresses[0]) || address_of(self, tensors[1], &addresses[1]) ||
        address_of(self, tensors[3], &addresses[2]) || (held[0] && address_of(self, held[0], &addresses[3])) ||
        (held[1] && address_of(self, held[1], &addresses[4])))
        return -1;
    PyObject *number = PyObject_Vectorcall(self->stream, &self->device, 1, NULL);
    if (!number)
        return -1;
    const int failed = as_address(number, &stream);
    Py_DECREF(number);
    return failed || queue(self->launches, (void *)(uintptr_t)stream, addresses) ? -1 : 0;
}

static PyObject *pass_call(PyObject *object, PyObject *const *args, size_t flags, PyObject *names)
{
    PassCall *self = (PassCall *)object;
    PyObject *tensors[PASS_TENSORS], *held[2] = {NULL, NULL};
    if (read_tensors(args, PyVectorcall_NARGS(flags), names, tensors))
        return NULL;
    const int left = is_left_to_python(self->launches);
    if (left < 0)
        return NULL;
    if (left || !self->instead) /* the second while a circle is being broken */
        return self->instead ? PyObject_Vectorcall(self->instead, tensors, PASS_TENSORS, NULL)
                             : PyErr_Format(PyExc_RuntimeError, "the pass was cleared: it is no longer in use");
    PyObject *out = tensors[3] == Py_None ? make(&self->result, tensors[0]) : Py_NewRef(tensors[3]);
    tensors[3] = out;
    int failed = !out || compute(self, tensors, held);
    if (!failed && tensors[2] != Py_None && !self->fit) {
        PyObject *pair[2] = {out, tensors[2]}, *added = PyObject_Vectorcall(self->add, pair, 2, NULL);
        failed = !added;
        Py_XDECREF(added);
    }
    /* The allocator gives the workspace to later kernels of this stream alone, so it may go once these are queued. */
    Py_XDECREF(held[0]);
    Py_XDECREF(held[1]);
    if (failed)
        Py_CLEAR(out);
    return out;
}

/* --- Making one ---------------------------------------------------------------------------------------------------- */

/* Read (function, args, names), or None into NULLs. */
static int read_maker(PyObject *given, Maker *into)
{
    if (given == Py_None)
        return 0;
    PyObject *function, *args, *names;
    if (!PyTuple_Check(given) || !PyArg_ParseTuple(given, "OO!O!", &function, &PyTuple_Type, &args, &PyTuple_Type, &names) ||
        PyTuple_GET_SIZE(args) > MOST_ARGUMENTS || PyTuple_GET_SIZE(names) > PyTuple_GET_SIZE(args)) {
        PyErr_Format(PyExc_TypeError, "maker %R: None or (function, args, names) would do", given);
        return -1;
    }
    into->function = Py_NewRef(function);
    into->args = Py_NewRef(args);
    into->names = Py_NewRef(names);
    return 0;
}

static PyObject *pass_new(PyTypeObject *type, PyObject *args, PyObject *kwargs)
{
    static char *names[] = {"launches", "instead", "stream", "device", "data_ptr", "result", "workspace", "fit", "add", NULL};
    PyObject *launches, *instead, *stream, *device, *data_ptr, *result, *workspace, *fit, *add;
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "O!OOOOOOOO:PassCall", names, &LaunchListType, &launches, &instead,
                                     &stream, &device, &data_ptr, &result, &workspace, &fit, &add))
        return NULL;
    const Py_ssize_t given = fit == Py_None ? PASS_TENSORS : PASS_TENSORS + 1;
    if (((LaunchList *)launches)->sources > given)
        return PyErr_Format(PyExc_ValueError, "the launches take %zd addresses, a pass gives %zd",
                            ((LaunchList *)launches)->sources, given);
    PassCall *self = (PassCall *)type->tp_alloc(type, 0);
    if (!self)
        return NULL;
    self->vectorcall = pass_call;
    self->launches = (LaunchList *)Py_NewRef(launches);
    self->instead = Py_NewRef(instead);
    self->stream = Py_NewRef(stream);
    self->device = Py_NewRef(device);
    self->data_ptr = Py_NewRef(data_ptr);
    self->fit = fit == Py_None ? NULL : Py_NewRef(fit);
    self->add = Py_NewRef(add);
    if (result == Py_None)
        PyErr_SetString(PyExc_TypeError, "result=None: (function, args, names) would do");
    if (result == Py_None || read_maker(result, &self->result) || read_maker(workspace, &self->workspace))
        Py_CLEAR(self);
    return (PyObject *)self;
}

static int pass_traverse(PyObject *object, visitproc visit, void *arg)
{
    PassCall *self = (PassCall *)object;
    Py_VISIT(self->launches);
    Py_VISIT(self->instead);
    Py_VISIT(self->stream);
    Py_VISIT(self->data_ptr);
    Py_VISIT(self->result.function);
    Py_VISIT(self->result.args);
    Py_VISIT(self->workspace.function);
    Py_VISIT(self->workspace.args);
    Py_VISIT(self->fit);
    Py_VISIT(self->add);
    return 0;
}

/* Break circles: a pass is held by what it calls instead. It cannot be called once this has run. */
static int pass_clear(PyObject *object)
{
    PassCall *self = (PassCall *)object;
    Py_CLEAR(self->instead);
    return 0;
}

static void pass_dealloc(PyObject *object)
{
    PassCall *self = (PassCall *)object;
    PyObject_GC_UnTrack(object);
    Py_XDECREF(self->launches);
    Py_XDECREF(self->instead);
    Py_XDECREF(self->stream);
    Py_XDECREF(self->device);
    Py_XDECREF(self->data_ptr);
    Maker *makers[] = {&self->result, &self->workspace};
    for (int i = 0; i < 2; i++) {
        Py_XDECREF(makers[i]->function);
        Py_XDECREF(makers[i]->args);
        Py_XDECREF(makers[i]->names);
    }
    Py_XDECREF(self->fit);
    Py_XDECREF(self->add);
    Py_TYPE(object)->tp_free(object);
}

static PyObject *pass_get_launches(PyObject *self, void *Py_UNUSED(closure))
{
    return Py_NewRef(((PassCall *)self)->launches);
}

static PyGetSetDef pass_properties[] = {
    {"launches", pass_get_launches, NULL, "The launches that a call queues.", NULL},
    {NULL, NULL, NULL, NULL, NULL},
};

static PyTypeObject PassCallType = {
    PyVarObject_HEAD_INIT(NULL, 0)
    .tp_name = "launches.PassCall",
    .tp_doc = "PassCall(launches, instead, stream, device, data_ptr, result, workspace, fit, add): a pass of a layer.\n\n"
              "call(a, b, bias=None, out=None) makes what is not given, queues the launches over the addresses of a, b,\n"
              "out, workspace and bias, and returns out. result and workspace are (function, args, names of the last\n"
              "args); the first is called with a before its args.",
    .tp_basicsize = sizeof(PassCall),
    .tp_flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC | Py_TPFLAGS_HAVE_VECTORCALL,
    .tp_vectorcall_offset = offsetof(PassCall, vectorcall),
    .tp_call = PyVectorcall_Call,
    .tp_new = pass_new,
    .tp_dealloc = pass_dealloc,
    .tp_traverse = pass_traverse,
    .tp_clear = pass_clear,
    .tp_getset = pass_properties,
};

#endif
