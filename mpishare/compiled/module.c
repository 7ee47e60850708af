/* The extension module: its functions and types, each in a file of its own. */

#include "module.h"

PyObject *address_of(PyObject *module, PyObject *buffer)
{
    (void)module;
    Py_buffer view;
    if (PyObject_GetBuffer(buffer, &view, PyBUF_WRITABLE))
        return NULL;
    PyObject *address = PyLong_FromVoidPtr(view.buf);
    PyBuffer_Release(&view); /* the caller sees to it that the memory stays */
    return address;
}

static PyMethodDef functions[] = {
    {"address_of", address_of, METH_O, "Return the address of the bytes of a writable buffer."},
    {"can_reduce", can_reduce, METH_O, "Return whether `Reduce` knows an operation: 'sum float64'."},
    {NULL, NULL, 0, NULL},
};

static struct PyModuleDef definition = {
    .m_base = PyModuleDef_HEAD_INIT,
    .m_name = "_mpishare_host",
    .m_size = -1,
    .m_methods = functions,
};

PyMODINIT_FUNC PyInit__mpishare_host(void)
{
    PyObject *module = PyModule_Create(&definition);
    if (module != NULL &&
        (PyModule_AddType(module, &ExchangeType) || PyModule_AddType(module, &FenceType) ||
         PyModule_AddType(module, &ReduceType))) {
        Py_DECREF(module);
        return NULL;
    }
    return module;
}
