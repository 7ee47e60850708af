/* The type `Exchange`: checks the fields of a call, and makes it. One call is a whole exchange. */

#include "exchange.h"

#include <stddef.h>
#include <structmember.h>

/* --- the fields of a call */

static bool fits(const Field *field, const PyObject *array_type, PyObject *given)
{
    if ((PyObject *)Py_TYPE(given) != array_type)
        return false;
    PyArrayObject *array = (PyArrayObject *)given;
    if ((PyObject *)PyArray_DESCR(array) != field->dtype || PyArray_NDIM(array) != field->ndim ||
        !(PyArray_FLAGS(array) & NPY_ARRAY_WRITEABLE))
        return false;
    const npy_intp *shape = PyArray_DIMS(array), *strides = PyArray_STRIDES(array);
    for (int axis = 0; axis < field->ndim; axis++)
        if (shape[axis] != field->shape[axis] ||
            (strides[axis] != field->strides[axis] && shape[axis] > 1 && field->span))
            return false; /* strides of an axis of one cell, or of no cells, may be any */
    return true;
}

/* Whether the node is whole, this is its thread, amid no call, and no capture is under way; -1 on
 * errors. */
static int is_whole(Exchange *self)
{
    static PyObject *failure_name, *thread_name;
    if (PyList_Size(self->recordings))
        return 0;
    PyObject *failure = attribute(self->life, &failure_name, "failure");
    if (failure == NULL)
        return -1;
    Py_DECREF(failure);
    if (failure != Py_None)
        return 0;
    PyObject *thread = attribute(self->agreement, &thread_name, "thread");
    if (thread == NULL)
        return -1;
    const unsigned long ident = PyLong_AsUnsignedLong(thread);
    Py_DECREF(thread);
    return ident == PyThread_get_thread_ident();
}

/* --- the calls */

static int require_open(const Exchange *self)
{
    if (self->is_closed)
        PyErr_SetString(PyExc_RuntimeError, "the exchange is closed");
    return self->is_closed ? -1 : 0;
}

static PyObject *finish(Exchange *self, int status, PyObject *value)
{
    exchange_hold_gil(self);
    return status ? NULL : Py_NewRef(value);
}

static int send(Exchange *self)
{
    const int status = exchange_send(self);
    self->is_started = !status;
    return status;
}

static int receive(Exchange *self)
{
    if (!self->is_started) {
        PyErr_SetString(PyExc_RuntimeError, "no exchange was started");
        return -1;
    }
    self->is_started = false;
    return exchange_receive(self);
}

static intptr_t distance(const Exchange *self, int at)
{
    return (intptr_t)((uintptr_t)self->bases[at] - (uintptr_t)self->bases[0]);
}

static void remember_apart(Exchange *self)
{
    for (int at = 1; at < self->nfields; at++)
        self->apart[at] = distance(self, at);
}

/* Whether no two fields share a cell. Where they reach into each other, Python finds out. */
static bool are_apart(Exchange *self)
{
    bool is_known = true;
    for (int at = 1; at < self->nfields; at++)
        is_known &= self->apart[at] == distance(self, at);
    if (is_known)
        return true;
    for (int at = 1; at < self->nfields; at++)
        for (int other = 0; other < at; other++)
            if (self->bases[at] < self->bases[other] + self->fields[other].span &&
                self->bases[other] < self->bases[at] + self->fields[at].span)
                return false;
    remember_apart(self);
    return true;
}

static PyObject *field_of(PyObject *fields, int at)
{
    return PyTuple_Check(fields) ? PyTuple_GetItem(fields, at) : PyList_GetItem(fields, at);
}

static bool has_all(const Exchange *self, PyObject *fields)
{
    return (PyTuple_Check(fields) && PyTuple_Size(fields) == self->nfields) ||
           (PyList_Check(fields) && PyList_Size(fields) == self->nfields);
}

/* Takes the addresses of the fields, if they are what the plan was made for. */
static bool take_fields(Exchange *self, PyObject *fields)
{
    if (!has_all(self, fields))
        return false;
    for (int at = 0; at < self->nfields; at++) {
        PyObject *field = field_of(fields, at);
        if (!fits(self->fields + at, self->array_type, field))
            return false;
        self->bases[at] = PyArray_BYTES((PyArrayObject *)field);
    }
    return are_apart(self);
}

/* Makes a call, or returns False with nothing done where C may not: Python then refuses another
 * thread, or a handler of a signal amid a call. */
static PyObject *try_call(Exchange *self, PyObject *fields, bool sends, bool receives)
{
    const int is_ours = require_open(self) ? -1 : is_whole(self);
    if (is_ours < 0)
        return NULL;
    if (!is_ours || (sends && !take_fields(self, fields)))
        return Py_NewRef(Py_False);
    int status = sends ? send(self) : 0;
    if (receives && !status)
        status = receive(self);
    return finish(self, status, Py_True);
}

static PyObject *exchange_try_exchange(Exchange *self, PyObject *fields)
{
    return try_call(self, fields, true, true);
}

static PyObject *exchange_try_start(Exchange *self, PyObject *fields)
{
    return try_call(self, fields, true, false);
}

static PyObject *exchange_try_wait(Exchange *self, PyObject *ignored)
{
    return try_call(self, ignored, false, true);
}

static PyObject *exchange_knows(Exchange *self, PyObject *fields)
{
    return PyBool_FromLong(!self->is_closed && !self->is_started && take_fields(self, fields));
}

static PyObject *exchange_start(Exchange *self, PyObject *fields)
{
    if (require_open(self))
        return NULL;
    bool are_arrays = has_all(self, fields);
    for (int at = 0; are_arrays && at < self->nfields; at++) {
        PyObject *field = field_of(fields, at);
        are_arrays = (PyObject *)Py_TYPE(field) == self->array_type;
        self->bases[at] = are_arrays ? PyArray_BYTES((PyArrayObject *)field) : NULL;
    }
    if (!are_arrays)
        return PyErr_Format(PyExc_ValueError, "an array for each field");
    remember_apart(self); /* Python has looked */
    return finish(self, send(self), Py_None);
}

static PyObject *exchange_wait(Exchange *self, PyObject *ignored)
{
    (void)ignored;
    if (require_open(self))
        return NULL;
    return finish(self, receive(self), Py_None);
}

static PyObject *exchange_close(Exchange *self, PyObject *ignored)
{
    (void)ignored;
    self->is_closed = true;
    Py_CLEAR(self->owner);
    Py_RETURN_NONE;
}

static int exchange_traverse(Exchange *self, visitproc visit, void *arg)
{
    Py_VISIT(Py_TYPE((PyObject *)self));
    Py_VISIT(self->owner);
    Py_VISIT(self->held);
    return 0;
}

static int exchange_clear(Exchange *self)
{
    self->is_closed = true;
    Py_CLEAR(self->owner);
    Py_CLEAR(self->held);
    return 0;
}

static void exchange_dealloc(Exchange *self)
{
    PyObject_GC_UnTrack(self);
    exchange_clear(self);
    free_object(self);
}

static PyObject *exchange_new(PyTypeObject *type, PyObject *arguments, PyObject *keywords)
{
    Exchange *self = (Exchange *)PyType_GenericAlloc(type, 0);
    if (self != NULL && exchange_make(self, arguments, keywords))
        Py_CLEAR(self);
    return (PyObject *)self;
}

static PyMethodDef methods[] = {
    {"try_exchange", (PyCFunction)exchange_try_exchange, METH_O,
     "Exchange a tuple of arrays of the plan's layouts, or return False with nothing done."},
    {"try_start", (PyCFunction)exchange_try_start, METH_O,
     "Start an exchange of such arrays, or return False with nothing done."},
    {"try_wait", (PyCFunction)exchange_try_wait, METH_O,
     "End the exchange that was started, or return False with nothing done."},
    {"knows", (PyCFunction)exchange_knows, METH_O,
     "Return whether the arrays are such; what is not known may be right, too."},
    {"start", (PyCFunction)exchange_start, METH_O,
     "Start an exchange of arrays that Python has checked, in any dtype of their size."},
    {"wait", (PyCFunction)exchange_wait, METH_NOARGS, "End the exchange that was started."},
    {"close", (PyCFunction)exchange_close, METH_NOARGS, "Refuse calls from now on."},
    {NULL, NULL, 0, NULL},
};

static PyMemberDef values[] = {
    {"epoch", T_ULONGLONG, offsetof(Exchange, epoch), READONLY, "How many exchanges were started."},
    {NULL, 0, 0, 0, NULL},
};

static PyType_Slot slots[] = {
    {Py_tp_doc, "Moves the cells of one plan between the ranks of a node."},
    {Py_tp_new, exchange_new},
    {Py_tp_dealloc, exchange_dealloc},
    {Py_tp_traverse, exchange_traverse},
    {Py_tp_clear, exchange_clear},
    {Py_tp_methods, methods},
    {Py_tp_members, values},
    {0, NULL},
};

PyType_Spec exchange_spec = {
    .name = "mpishare.native._host.Exchange",
    .basicsize = sizeof(Exchange),
    .flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC | Py_TPFLAGS_IMMUTABLETYPE,
    .slots = slots,
};
