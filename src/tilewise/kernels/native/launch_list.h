/* LaunchList: launches of GPU kernels and products by cuBLAS and cuBLASLt, described once and queued by one call. launches.c says
 * what it is for. */

#ifndef TILEWISE_LAUNCH_LIST_H
#define TILEWISE_LAUNCH_LIST_H

#include "driver.h"
#include "lt_product.h"
#include "product.h"

enum {
    MOST_SOURCES = 64,      /* tensors that a list takes the addresses of */
    MOST_PARAMETERS = 256,  /* of one kernel */
    MOST_HOOKS = 2,
    CONSTANT = -1           /* in place of a source: the parameter is the same in every call */
};

typedef struct {
    void *function;
    Config config; /* all but the stream */
    Py_ssize_t first, count; /* its parameters in `values` and `from` */
    const Product *product;     /* in place of all these; NULL for anything else */
    const LtProduct *lt_product; /* the same */
} Launch;

typedef struct { /* an attribute of a Python object that may hold a function to be told of launches */
    PyObject *owner, *name;
    PyObject *chain; /* what the attribute held when the list was made */
    PyObject *calls; /* the chain's list of functions; NULL where the attribute held None */
} Hook;

typedef struct {
    PyObject_HEAD
    vectorcallfunc vectorcall;
    Driver *driver;
    void *context; /* the CUcontext in which the functions are loaded */
    Py_ssize_t sources, launch_count;
    Launch *launches;
    Product *products; /* NULL where there are none */
    LtProduct *lt_products;
    Py_ssize_t lt_count;
    Attribute *attributes;
    uint64_t *values; /* of each parameter: its bytes, or its offset from its source */
    int8_t *from;     /* of each parameter: its source, or CONSTANT */
    Hook hooks[MOST_HOOKS];
    Py_ssize_t hook_count;
    PyObject *instead; /* called with the same addresses where the list is left to Python */
    PyObject *descriptions;
} LaunchList;

/* Queue a kernel. */
static Status queue_kernel(const LaunchList *self, const Launch *launch, void *stream, const uint64_t *addresses)
{
    void *parameters[MOST_PARAMETERS];
    uint64_t moved[MOST_PARAMETERS], *values = self->values + launch->first;
    const int8_t *from = self->from + launch->first;
    for (Py_ssize_t p = 0; p < launch->count; p++) {
        if (from[p] == CONSTANT) {
            parameters[p] = &values[p];
        } else {
            moved[p] = addresses[from[p]] + values[p];
            parameters[p] = &moved[p];
        }
    }
    Config config = launch->config;
    config.stream = stream;
    return self->driver->launch(&config, launch->function, parameters, NULL);
}

/* Queue all launches. `addresses` has one address a source; products take `library`, cuBLAS's handle. Returns the first
 * error, the driver's or cuBLAS's, and in `failed` where it was. Needs no Python: it is called without the interpreter's
 * lock. */
static Status queue_all(const LaunchList *self, void *stream, void *library, const uint64_t *addresses, Py_ssize_t *failed)
{
    const Driver *driver = self->driver;
    void *before = NULL;
    *failed = -1;
    Status status = driver->current_context(&before);
    if (status)
        return status;
    /* Another device is current, or none yet in this thread. */
    const int elsewhere = before != self->context;
    if (elsewhere && (status = driver->push_context(self->context)))
        return status;
    for (Py_ssize_t i = 0; i < self->launch_count && !status; i++) {
        const Launch *launch = &self->launches[i];
        status = launch->product      ? queue_product(launch->product, library, addresses)
                 : launch->lt_product ? queue_lt(launch->lt_product, stream, addresses)
                                      : queue_kernel(self, launch, stream, addresses);
        *failed = i;
    }
    if (elsewhere) {
        const Status popped = driver->pop_context(&before);
        if (!status && (status = popped))
            *failed = -1;
    }
    return status;
}

/* Queue all launches, with the lock released. Returns 0, or -1 with an error set. */
static int queue(LaunchList *self, void *stream, const uint64_t *addresses)
{
    Py_ssize_t failed;
    Status status;
    void *library = NULL;
    if (self->products && handle_of(self->products, &library))
        return -1;
    Py_BEGIN_ALLOW_THREADS
    status = queue_all(self, stream, library, addresses, &failed);
    Py_END_ALLOW_THREADS
    if (!status)
        return 0;
    if (failed >= 0 && self->launches[failed].product)
        return raise_product(self->launches[failed].product, status);
    if (failed >= 0 && self->launches[failed].lt_product)
        return raise_lt(self->launches[failed].lt_product, status);
    char what[64];
    PyOS_snprintf(what, sizeof what, "launch %zd of %zd", failed + 1, self->launch_count);
    raise_status(self->driver, failed < 0 ? "making a launch's context current" : what, status);
    return -1;
}

/* Whether Python must queue the list now: where somebody is to be told of launches, or where another device is current
 * than that of products. 1 or 0, -1 with an error set. */
static int is_left_to_python(const LaunchList *self)
{
    for (Py_ssize_t i = 0; i < self->hook_count; i++) {
        const Hook *hook = &self->hooks[i];
        PyObject *now = PyObject_GetAttr(hook->owner, hook->name);
        if (!now)
            return -1;
        Py_DECREF(now); /* compared, not used */
        if (now == Py_None)
            continue;
        if (now != hook->chain || !hook->calls || PyList_GET_SIZE(hook->calls))
            return 1;
    }
    return self->products ? is_elsewhere(self->products) : 0;
}

/* An address that is a Python int. Returns 0, or -1 with an error set. */
static int as_address(PyObject *number, uint64_t *address)
{
    *address = PyLong_AsUnsignedLongLong(number);
    return *address == (uint64_t)-1 && PyErr_Occurred() ? -1 : 0;
}

static PyObject *list_call(PyObject *object, PyObject *const *args, size_t flags, PyObject *names)
{
    LaunchList *self = (LaunchList *)object;
    const Py_ssize_t count = PyVectorcall_NARGS(flags);
    uint64_t stream, addresses[MOST_SOURCES];
    if (count < self->sources + 1 || (names && PyTuple_GET_SIZE(names))) /* further addresses are of no use to it */
        return PyErr_Format(PyExc_TypeError, "%zd arguments given: a stream and %zd addresses would do", count,
                            self->sources);
    const int left = is_left_to_python(self);
    if (left < 0)
        return NULL;
    if (left && !self->instead)
        return PyErr_Format(PyExc_RuntimeError, "the list was cleared: it can only be called while it is in use");
    if (left)
        return PyObject_Vectorcall(self->instead, args + 1, (size_t)(count - 1), NULL);
    if (as_address(args[0], &stream))
        return NULL;
    for (Py_ssize_t i = 0; i < self->sources; i++)
        if (as_address(args[i + 1], &addresses[i]))
            return NULL;
    if (queue(self, (void *)(uintptr_t)stream, addresses))
        return NULL;
    Py_RETURN_NONE;
}

/* --- Making one ---------------------------------------------------------------------------------------------------- */

/* Read three numbers of blocks or threads, each at least 1. */
static int read_sizes(PyObject *sizes, const char *what, unsigned into[3])
{
    if (!PyArg_ParseTuple(sizes, "III;three numbers would do", &into[0], &into[1], &into[2]))
        return -1;
    for (int i = 0; i < 3; i++)
        if (!into[i]) {
            PyErr_Format(PyExc_ValueError, "%s of %R: numbers from 1 on would do", what, sizes);
            return -1;
        }
    return 0;
}

/* Read ((id, value), ...) into `into`, and how many there are into `count`. */
static int read_attributes(PyObject *given, Attribute *into, unsigned *count)
{
    const Py_ssize_t size = PyTuple_GET_SIZE(given);
    if (size > MOST_ATTRIBUTES) {
        PyErr_Format(PyExc_ValueError, "%zd attributes: at most %d would do", size, MOST_ATTRIBUTES);
        return -1;
    }
    for (Py_ssize_t i = 0; i < size; i++) {
        const char *value;
        Py_ssize_t bytes;
        if (!PyArg_ParseTuple(PyTuple_GET_ITEM(given, i), "iy#;an attribute is (id, value)", &into[i].id, &value, &bytes))
            return -1;
        if (bytes > (Py_ssize_t)sizeof into[i].value) {
            PyErr_Format(PyExc_ValueError, "an attribute of %zd bytes: at most 64 would do", bytes);
            return -1;
        }
        memcpy(into[i].value, value, (size_t)bytes);
    }
    *count = (unsigned)size;
    return 0;
}

/* Read one parameter, and its size in bytes into `size`. */
static int read_parameter(PyObject *given, Py_ssize_t sources, uint64_t *value, int8_t *from, size_t *size)
{
    if (PyBytes_Check(given)) {
        *size = (size_t)PyBytes_GET_SIZE(given);
        if (*size != 1 && *size != 2 && *size != 4 && *size != 8) {
            PyErr_Format(PyExc_ValueError, "a parameter of %zu bytes: 1, 2, 4 or 8 would do", *size);
            return -1;
        }
        memcpy(value, PyBytes_AS_STRING(given), *size); /* at its lowest address, where the driver reads it */
        *from = CONSTANT;
        return 0;
    }
    Py_ssize_t source;
    long long offset;
    if (!PyTuple_Check(given) || !PyArg_ParseTuple(given, "nL;a parameter is bytes or (source, offset)", &source, &offset)) {
        if (!PyErr_Occurred())
            PyErr_Format(PyExc_TypeError, "parameter %R: bytes or (source, offset) would do", given);
        return -1;
    }
    if (source < 0 || source >= sources) {
        PyErr_Format(PyExc_ValueError, "source %zd: 0 to %zd would do", source, sources - 1);
        return -1;
    }
    *value = (uint64_t)offset;
    *from = (int8_t)source;
    *size = 8;
    return 0;
}

/* Compare a parameter with what the loaded kernel has in its place: a wrong size would make it read elsewhere. */
static int check_parameter(const Driver *driver, void *function, Py_ssize_t index, Py_ssize_t count, size_t size)
{
    size_t offset, actual = 0;
    const int there = driver->parameter_info(function, (size_t)index, &offset, &actual) == 0;
    if (there == (index < count) && (!there || actual == size))
        return 0;
    if (there)
        PyErr_Format(PyExc_ValueError, "parameter %zd of %zd has %zu bytes, in the kernel %zu", index, count, size, actual);
    else
        PyErr_Format(PyExc_ValueError, "%zd parameters given, the kernel has %zd", count, index);
    return -1;
}

/* Read description number `index` into what comes next: `*next` parameters and `*products` products lie before it.
 * Products by cuBLASLt are counted as they are read, so that those which hold a lock are known. */
static int read_launch(LaunchList *self, Py_ssize_t index, Py_ssize_t *next, Py_ssize_t *products)
{
    Launch *launch = &self->launches[index];
    if (is_lt_product(PyTuple_GET_ITEM(self->descriptions, index))) {
        LtProduct *product = &self->lt_products[self->lt_count++];
        launch->lt_product = product;
        return read_lt_product(PyTuple_GET_ITEM(self->descriptions, index), self->sources, product);
    }
    if (is_product(PyTuple_GET_ITEM(self->descriptions, index))) {
        Product *product = &self->products[(*products)++];
        launch->product = product;
        return read_product(PyTuple_GET_ITEM(self->descriptions, index), self->sources, product);
    }
    unsigned long long function;
    PyObject *grid, *block, *attributes, *parameters;
    if (!PyArg_ParseTuple(PyTuple_GET_ITEM(self->descriptions, index), "KO!O!IO!O!", &function, &PyTuple_Type, &grid,
                          &PyTuple_Type, &block, &launch->config.shared, &PyTuple_Type, &attributes, &PyTuple_Type,
                          &parameters))
        return -1;
    launch->function = (void *)(uintptr_t)function;
    launch->config.attributes = self->attributes + index * MOST_ATTRIBUTES;
    if (read_sizes(grid, "grid", launch->config.grid) || read_sizes(block, "block", launch->config.block) ||
        read_attributes(attributes, launch->config.attributes, &launch->config.attribute_count))
        return -1;
    launch->first = *next;
    launch->count = PyTuple_GET_SIZE(parameters);
    for (Py_ssize_t p = 0; p < launch->count; p++) {
        size_t size;
        const Py_ssize_t place = launch->first + p;
        if (read_parameter(PyTuple_GET_ITEM(parameters, p), self->sources, &self->values[place], &self->from[place], &size) ||
            check_parameter(self->driver, launch->function, p, launch->count, size))
            return -1;
    }
    *next += launch->count;
    return check_parameter(self->driver, launch->function, launch->count, launch->count, 0);
}

/* Count the parameters of all kernels, and the products of both libraries. Returns 0, or -1 with an error set. */
static int count_all(PyObject *descriptions, Py_ssize_t *parameters, Py_ssize_t *products, Py_ssize_t *lt_products)
{
    for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(descriptions); i++) {
        PyObject *one = PyTuple_GET_ITEM(descriptions, i);
        if (is_product(one)) {
            ++*products;
            continue;
        }
        if (is_lt_product(one)) {
            ++*lt_products;
            continue;
        }
        if (!PyTuple_Check(one) || PyTuple_GET_SIZE(one) != 6 || !PyTuple_Check(PyTuple_GET_ITEM(one, 5))) {
            PyErr_SetString(PyExc_TypeError, "a description is (function, grid, block, shared, attributes, parameters)");
            return -1;
        }
        const Py_ssize_t count = PyTuple_GET_SIZE(PyTuple_GET_ITEM(one, 5));
        if (count > MOST_PARAMETERS) {
            PyErr_Format(PyExc_ValueError, "%zd parameters: at most %d would do", count, MOST_PARAMETERS);
            return -1;
        }
        *parameters += count;
    }
    return 0;
}

/* Remember the attribute that holds functions to be told of launches. */
static int read_hook(LaunchList *self, PyObject *given)
{
    Hook *hook = &self->hooks[self->hook_count];
    if (!PyTuple_Check(given) || !PyArg_ParseTuple(given, "OU;a hook is (owner, name)", &hook->owner, &hook->name)) {
        if (!PyErr_Occurred())
            PyErr_Format(PyExc_TypeError, "hook %R: (owner, name) would do", given);
        return -1;
    }
    Py_INCREF(hook->owner);
    Py_INCREF(hook->name);
    self->hook_count++; /* from here on it is released with the list */
    hook->chain = PyObject_GetAttr(hook->owner, hook->name);
    if (!hook->chain)
        return -1;
    hook->calls = PyObject_GetAttrString(hook->chain, "calls");
    if (hook->calls && !PyList_Check(hook->calls))
        Py_CLEAR(hook->calls);
    PyErr_Clear(); /* no chain but None, or one function: then it counts as set */
    return 0;
}

static int list_traverse(PyObject *object, visitproc visit, void *arg)
{
    LaunchList *self = (LaunchList *)object;
    for (Py_ssize_t i = 0; i < self->hook_count; i++) {
        Py_VISIT(self->hooks[i].owner);
        Py_VISIT(self->hooks[i].chain);
        Py_VISIT(self->hooks[i].calls);
    }
    Py_VISIT(self->instead);
    Py_VISIT(self->descriptions);
    return 0;
}

/* Break circles: a list is held by what it calls instead. It cannot be called once this has run. */
static int list_clear(PyObject *object)
{
    Py_CLEAR(((LaunchList *)object)->instead);
    return 0;
}

static void list_dealloc(PyObject *object)
{
    LaunchList *self = (LaunchList *)object;
    PyObject_GC_UnTrack(object);
    for (Py_ssize_t i = 0; i < self->hook_count; i++) {
        Py_XDECREF(self->hooks[i].owner);
        Py_XDECREF(self->hooks[i].name);
        Py_XDECREF(self->hooks[i].chain);
        Py_XDECREF(self->hooks[i].calls);
    }
    Py_XDECREF(self->instead);
    Py_XDECREF(self->descriptions);
    Py_XDECREF(self->driver);
    for (Py_ssize_t i = 0; i < self->lt_count; i++)
        if (self->lt_products[i].lock)
            PyThread_free_lock(self->lt_products[i].lock);
    PyMem_Free(self->launches); /* and what lies behind them */
    Py_TYPE(object)->tp_free(object);
}

/* One block of zeros for launches, products, values, sources and attributes, in the order in which a call reads most of
 * them. */
static int reserve(LaunchList *self, Py_ssize_t parameters, Py_ssize_t products, Py_ssize_t lt_products)
{
    const size_t count = (size_t)self->launch_count, each = (size_t)parameters;
    const size_t lt = count * sizeof(Launch) + (size_t)products * sizeof(Product);
    const size_t head = lt + (size_t)lt_products * sizeof(LtProduct), values = each * sizeof *self->values;
    char *block = PyMem_Calloc(1, head + values + each + 8 + count * MOST_ATTRIBUTES * sizeof(Attribute));
    if (!block) {
        PyErr_NoMemory();
        return -1;
    }
    self->launches = (Launch *)block;
    self->products = products ? (Product *)(block + count * sizeof(Launch)) : NULL;
    self->lt_products = (LtProduct *)(block + lt);
    self->values = (uint64_t *)(block + head);
    self->from = (int8_t *)(block + head + values);
    self->attributes = (Attribute *)(block + head + values + (each + 7) / 8 * 8);
    return 0;
}

static PyObject *list_new(PyTypeObject *type, PyObject *args, PyObject *kwargs)
{
    static char *names[] = {"driver", "sources", "descriptions", "hooks", "instead", NULL};
    PyObject *driver, *descriptions, *hooks, *instead;
    Py_ssize_t sources;
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "O!nO!O!O:LaunchList", names, &DriverType, &driver, &sources,
                                     &PyTuple_Type, &descriptions, &PyTuple_Type, &hooks, &instead))
        return NULL;
    if (sources < 1 || sources > MOST_SOURCES)
        return PyErr_Format(PyExc_ValueError, "sources=%zd: 1 to %d would do", sources, MOST_SOURCES);
    if (PyTuple_GET_SIZE(hooks) > MOST_HOOKS)
        return PyErr_Format(PyExc_ValueError, "%zd hooks: at most %d would do", PyTuple_GET_SIZE(hooks), MOST_HOOKS);
    Py_ssize_t parameters = 0, products = 0, lt_products = 0, next_parameter = 0, next_product = 0;
    if (count_all(descriptions, &parameters, &products, &lt_products))
        return NULL;
    LaunchList *self = (LaunchList *)type->tp_alloc(type, 0);
    if (!self)
        return NULL;
    self->vectorcall = list_call;
    self->driver = (Driver *)Py_NewRef(driver);
    self->descriptions = Py_NewRef(descriptions);
    self->instead = Py_NewRef(instead);
    self->sources = sources;
    self->launch_count = PyTuple_GET_SIZE(descriptions);
    int wrong = reserve(self, parameters, products, lt_products);
    for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(hooks) && !wrong; i++)
        wrong = read_hook(self, PyTuple_GET_ITEM(hooks, i));
    for (Py_ssize_t i = 0; i < self->launch_count && !wrong; i++)
        wrong = read_launch(self, i, &next_parameter, &next_product);
    if (!wrong) {
        const Status status = self->driver->current_context(&self->context);
        if ((wrong = status || !self->context) && status)
            raise_status(self->driver, "cuCtxGetCurrent", status);
        else if (wrong)
            PyErr_SetString(PyExc_RuntimeError, "no CUDA context is current: within torch.cuda.device there is one");
    }
    if (wrong)
        Py_CLEAR(self);
    return (PyObject *)self;
}

static PyObject *list_get_descriptions(PyObject *self, void *Py_UNUSED(closure))
{
    return Py_NewRef(((LaunchList *)self)->descriptions);
}

static PyGetSetDef list_properties[] = {
    {"descriptions", list_get_descriptions, NULL, "What the list was made from.", NULL},
    {NULL, NULL, NULL, NULL, NULL},
};

static PyTypeObject LaunchListType = {
    PyVarObject_HEAD_INIT(NULL, 0)
    .tp_name = "launches.LaunchList",
    .tp_doc = "LaunchList(driver, sources, descriptions, hooks, instead): launches, queued in order by one call.\n\n"
              "It belongs to the CUDA context that is current when it is made. launches(stream, *addresses) queues all\n"
              "of them there, whatever device is current. hooks are ((owner, name), ...): where such an attribute holds\n"
              "functions, instead(*addresses) is called, and where products are on another device than the current one.\n"
              "Raises RuntimeError with the driver's name for an error, and what products say for one of cuBLAS.",
    .tp_basicsize = sizeof(LaunchList),
    .tp_flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC | Py_TPFLAGS_HAVE_VECTORCALL,
    .tp_vectorcall_offset = offsetof(LaunchList, vectorcall),
    .tp_call = PyVectorcall_Call,
    .tp_new = list_new,
    .tp_dealloc = list_dealloc,
    .tp_traverse = list_traverse,
    .tp_clear = list_clear,
    .tp_getset = list_properties,
};

#endif
