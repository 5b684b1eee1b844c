/* Launches of GPU kernels and products by cuBLAS, described once and queued by one call.
 *
 * A Python program that launches a kernel pays some 20 us for it: a closure, a list of arguments, a launcher that
 * parses every one of them. Here all that does not change between calls is written down when a plan is bound. What is
 * left of a call are the addresses of the tensors, a few additions, and the driver's own function.
 *
 * The module has three types, and `api`, by which other native modules queue launches (launch_api.h):
 *
 *     driver = Driver("libcuda.so.1")                                          driver.h
 *     launches = LaunchList(driver, sources, descriptions, hooks, instead)     launch_list.h
 *     launches(stream, address0, address1, ...)
 *     run = PassCall(launches, ...)                                            pass_call.h
 *     out = run(a, b, bias, out)
 *
 * A description is (function, grid, block, shared, attributes, parameters): the CUfunction as an int, three numbers of
 * blocks, three numbers of threads, bytes of dynamic shared memory, ((id, value), ...) as in CUlaunchAttribute, and for
 * each parameter either its bytes (1, 2, 4 or 8 of them) or (source, offset): the address of tensor number `source`,
 * and `offset` bytes further. A product's description is that of sequence.py, read in product.h; one
 * by cuBLASLt in lt_product.h.
 *
 * Nothing is written to a LaunchList after it is made, and a call keeps what it computes on its own stack. So any
 * number of threads may call one list at once, the interpreter's lock is not held while the driver works (it waits
 * when its queue is full), and a call allocates nothing.
 *
 * Only Python.h and the C library are needed.
 */

#include "pass_call.h"

#include "launch_api.h"

static int api_left_to_python(PyObject *list)
{
    return is_left_to_python((LaunchList *)list);
}

static int api_queue(PyObject *list, void *stream, const uint64_t *addresses)
{
    return queue((LaunchList *)list, stream, addresses);
}

static LaunchApi api = {api_left_to_python, api_queue};

static struct PyModuleDef module = {
    PyModuleDef_HEAD_INIT,
    .m_name = "launches",
    .m_doc = "Launches of GPU kernels, described once and queued by one call.",
    .m_size = -1,
};

PyMODINIT_FUNC PyInit_launches(void)
{
    bias_name = PyUnicode_InternFromString("bias");
    out_name = PyUnicode_InternFromString("out");
    PyObject *self = bias_name && out_name ? PyModule_Create(&module) : NULL;
    if (self && (PyModule_AddType(self, &DriverType) || PyModule_AddType(self, &LaunchListType) ||
                 PyModule_AddType(self, &PassCallType)))
        Py_CLEAR(self);
    PyObject *capsule = self ? PyCapsule_New(&api, LAUNCH_API, NULL) : NULL;
    if (self && (!capsule || PyModule_AddObjectRef(self, "api", capsule)))
        Py_CLEAR(self);
    Py_XDECREF(capsule);
    return self;
}
