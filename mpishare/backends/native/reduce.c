/* The reduction of small fields: a rank copies its elements into its slot, all meet, and each folds
 * the slots of all, in the order of the ranks. The words are those of mpishare.reduction.slots. */

#define NPY_NO_DEPRECATED_API NPY_1_7_API_VERSION
#include "wait.h"
#include "numbers.h"
#include <numpy/arrayobject.h>
#include <string.h>

typedef void (*Fold)(void *into, void *const *from, Py_ssize_t nranks, Py_ssize_t count);

typedef struct {
    PyObject_HEAD
    Word **control;  /* of each rank: the words of even and of odd epochs */
    void **slots[2]; /* of each rank, for even and for odd uses */
    void *unaligned; /* room for a result, if the field is not aligned */
    PyObject *array_type, *dtype;
    Py_ssize_t nelements; /* of the array, each of one number or of two */
    Py_ssize_t nranks, place, count;
    size_t nbytes;
    Fold fold;
    int looks_per_yield;
} Reduce;

/* --- the operations */

#define FOLD(operation, number, type)                                                              \
    static void fold_##operation##_##number(void *into, void *const *from, Py_ssize_t nranks,      \
                                            Py_ssize_t count)                                      \
    {                                                                                              \
        type *restrict result = into;                                                              \
        const type *restrict first = from[0];                                                      \
        for (Py_ssize_t rank = 1; rank < nranks; rank++) {                                         \
            const type *restrict other = from[rank];                                               \
            if (rank == 1)                                                                         \
                for (Py_ssize_t at = 0; at < count; at++)                                          \
                    result[at] = operation##_##number(first[at], other[at]);                       \
            else                                                                                   \
                for (Py_ssize_t at = 0; at < count; at++)                                          \
                    result[at] = operation##_##number(result[at], other[at]);                      \
        }                                                                                          \
    }

#define FOLDS(number, type, wide)                                                                  \
    FOLD(sum, number, type)                                                                        \
    FOLD(prod, number, type)                                                                       \
    FOLD(max, number, type)                                                                        \
    FOLD(min, number, type)

EACH_NUMBER(FOLDS)

/* Values with their indices, in a complex number: of equal values, and of NaNs, the lowest index. */
#define LOCATE(operation, number, type, beyond)                                                    \
    static inline type operation##_##number(type a, type b)                                        \
    {                                                                                              \
        const bool was_nan = a.value != a.value, is_nan = b.value != b.value;                      \
        if (a.value == b.value || (was_nan && is_nan))                                             \
            return b.index < a.index ? b : a;                                                      \
        return is_nan || b.value beyond a.value ? b : a;                                           \
    }                                                                                              \
    FOLD(operation, number, type)

#define LOCATES(pair, number, type)                                                                \
    typedef struct {                                                                               \
        type value, index;                                                                         \
    } pair;                                                                                        \
    LOCATE(maxloc, pair, pair, >)                                                                  \
    LOCATE(minloc, pair, pair, <)

EACH_PAIR(LOCATES)

#define ROW(operation, number, type)                                                               \
    {#operation " " #number, fold_##operation##_##number, sizeof(type)},
#define ROWS(number, type, wide)                                                                   \
    ROW(sum, number, type) ROW(prod, number, type) ROW(max, number, type) ROW(min, number, type)
#define ROWS_OF_PAIRS(pair, number, type)                                                          \
    {"sum " #pair, fold_sum_##number, sizeof(type)}, ROW(maxloc, pair, pair) ROW(minloc, pair, pair)

static const struct {
    const char *name;
    Fold fold;
    size_t nbytes;
} folds[] = {EACH_NUMBER(ROWS) EACH_PAIR(ROWS_OF_PAIRS)};

static int find_fold(const char *name)
{
    for (int at = 0; at < (int)(sizeof folds / sizeof *folds); at++)
        if (!strcmp(folds[at].name, name))
            return at;
    return -1;
}

/* --- the type */

static void reduce_dealloc(Reduce *self)
{
    PyMem_Free(self->control);
    PyMem_Free(self->slots[0]);
    PyMem_Free(self->slots[1]);
    PyMem_Free(self->unaligned);
    Py_CLEAR(self->array_type);
    Py_CLEAR(self->dtype);
    free_object(self);
}

/* The addresses of a buffer for each rank, which have room for that many bytes. */
static void *read_buffers(PyObject *buffers, Py_ssize_t nranks, size_t nbytes)
{
    if (PyList_Size(buffers) != nranks)
        return PyErr_Format(PyExc_ValueError, "a buffer for each of %zd ranks is needed", nranks);
    void **found = PyMem_Calloc((size_t)nranks + 1, sizeof *found);
    if (found == NULL)
        return PyErr_NoMemory();
    for (Py_ssize_t at = 0; at < nranks && !PyErr_Occurred(); at++) {
        Py_buffer view;
        if (PyObject_GetBuffer(PyList_GetItem(buffers, at), &view, PyBUF_WRITABLE))
            break;
        found[at] = view.buf;
        if ((size_t)view.len < nbytes)
            PyErr_Format(PyExc_ValueError, "a buffer has %zd bytes of %zu", view.len, nbytes);
        PyBuffer_Release(&view); /* the caller sees to it that the memory stays */
    }
    if (!PyErr_Occurred())
        return found;
    PyMem_Free(found);
    return NULL;
}

/* Finds the operation on elements of the dtype, which are numbers that it knows, or pairs of them. */
static int read_operation(Reduce *self, const char *operation)
{
    const int row = find_fold(operation);
    if (row < 0) {
        PyErr_Format(PyExc_ValueError, "%s is not compiled", operation);
        return -1;
    }
    PyObject *value = PyObject_GetAttrString(self->dtype, "itemsize");
    const Py_ssize_t itemsize = value == NULL ? -1 : PyLong_AsSsize_t(value);
    Py_XDECREF(value);
    if (PyErr_Occurred())
        return -1;
    const Py_ssize_t nbytes = (Py_ssize_t)folds[row].nbytes;
    if (itemsize <= 0 || itemsize % nbytes || self->nelements < 0 ||
        self->nelements > PY_SSIZE_T_MAX / itemsize) {
        PyErr_Format(PyExc_ValueError, "%s of %zd elements of %zd bytes", operation,
                     self->nelements, itemsize);
        return -1;
    }
    self->fold = folds[row].fold;
    self->nbytes = (size_t)(self->nelements * itemsize);
    self->count = self->nelements * (itemsize / nbytes);
    return 0;
}

static int read_arguments(Reduce *self, PyObject *arguments, PyObject *keywords)
{
    static char *names[] = {"operation", "array_type", "dtype", "nelements",       "place",
                            "control",   "even",       "odd",   "looks_per_yield", NULL};
    const char *operation;
    PyObject *array_type, *dtype, *control, *even, *odd;
    if (!PyArg_ParseTupleAndKeywords(arguments, keywords, "sOOnnO!O!O!i", names, &operation,
                                     &array_type, &dtype, &self->nelements, &self->place,
                                     &PyList_Type, &control, &PyList_Type, &even, &PyList_Type,
                                     &odd, &self->looks_per_yield) ||
        require_looks(self->looks_per_yield))
        return -1;
    self->array_type = Py_NewRef(array_type);
    self->dtype = Py_NewRef(dtype);
    self->nranks = PyList_Size(control);
    if (self->place < 0 || self->place >= self->nranks) {
        PyErr_Format(PyExc_ValueError, "there is no place %zd", self->place);
        return -1;
    }
    if (read_operation(self, operation) ||
        !(self->control = read_buffers(control, self->nranks, 2 * sizeof(Word))) ||
        !(self->slots[0] = read_buffers(even, self->nranks, self->nbytes)) ||
        !(self->slots[1] = read_buffers(odd, self->nranks, self->nbytes)))
        return -1;
    self->unaligned = PyMem_Malloc(self->nbytes);
    if (self->unaligned == NULL)
        PyErr_NoMemory();
    return self->unaligned == NULL ? -1 : 0;
}

static PyObject *reduce_new(PyTypeObject *type, PyObject *arguments, PyObject *keywords)
{
    Reduce *self = (Reduce *)PyType_GenericAlloc(type, 0);
    if (self != NULL && read_arguments(self, arguments, keywords))
        Py_CLEAR(self);
    return (PyObject *)self;
}

/* Whether it is a packed array of the elements; -1 on errors. */
static int fits(const Reduce *self, PyObject *given)
{
    PyArrayObject *array = (PyArrayObject *)given;
    if ((PyObject *)Py_TYPE(given) != self->array_type ||
        !(PyArray_FLAGS(array) & NPY_ARRAY_WRITEABLE) ||
        !(PyArray_FLAGS(array) & (NPY_ARRAY_C_CONTIGUOUS | NPY_ARRAY_F_CONTIGUOUS)))
        return 0;
    Py_ssize_t nelements = 1;
    for (int axis = 0; axis < PyArray_NDIM(array); axis++)
        nelements *= PyArray_DIMS(array)[axis];
    if (nelements != self->nelements)
        return 0;
    PyObject *dtype = (PyObject *)PyArray_DESCR(array);
    return dtype == self->dtype ? 1 : PyObject_RichCompareBool(dtype, self->dtype, Py_EQ);
}

static PyObject *reduce_reduce(Reduce *self, PyObject *const *given, Py_ssize_t count)
{
    if (count != 4)
        return PyErr_Format(PyExc_TypeError, "an array, a parity, an epoch and a word are needed");
    const int is_ours = fits(self, given[0]);
    if (is_ours <= 0)
        return is_ours ? NULL : PyErr_Format(PyExc_TypeError, "the array is not of this reduction");
    PyArrayObject *array = (PyArrayObject *)given[0];
    const long parity = PyLong_AsLong(given[1]) & 1;
    const uint64_t epoch = PyLong_AsUnsignedLongLong(given[2]);
    const uint64_t value = PyLong_AsUnsignedLongLong(given[3]);
    if (PyErr_Occurred())
        return NULL;
    void *field = PyArray_DATA(array), **slots = self->slots[parity];
    Word *mine = self->control[self->place] + (epoch & 1);
    if (load_acquire(mine) != value) { /* else it is called again, and the others may read the slot */
        memcpy(slots[self->place], field, self->nbytes);
        store_release(mine, value);
    }
    for (Py_ssize_t rank = 0; rank < self->nranks; rank++) {
        const Word *word = self->control[rank] + (epoch & 1);
        if (!wait_word(word, value & ~(uint64_t)1, self->looks_per_yield) ||
            load_acquire(word) != value)
            Py_RETURN_FALSE;
    }
    const bool is_aligned = PyArray_FLAGS(array) & NPY_ARRAY_ALIGNED;
    self->fold(is_aligned ? field : self->unaligned, slots, self->nranks, self->count);
    if (!is_aligned)
        memcpy(field, self->unaligned, self->nbytes);
    Py_RETURN_TRUE;
}

static PyMethodDef reduce_methods[] = {
    {"reduce", (PyCFunction)(void (*)(void))reduce_reduce, METH_FASTCALL,
     "reduce(array, parity, epoch, word): combine the arrays of all ranks, in that use of the "
     "slots and that epoch, with that word in control. Return whether it is done: if not, a rank "
     "has not come within a millisecond, or has made another call."},
    {NULL, NULL, 0, NULL},
};

static PyType_Slot reduce_slots[] = {
    {Py_tp_doc, "Reduce(operation, array_type, dtype, nelements, place, control, even, odd, "
                "looks_per_yield)"},
    {Py_tp_new, reduce_new},
    {Py_tp_dealloc, reduce_dealloc},
    {Py_tp_methods, reduce_methods},
    {0, NULL},
};

PyType_Spec reduce_spec = {
    .name = "mpishare.backends.native._host.Reduce",
    .basicsize = sizeof(Reduce),
    .flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_IMMUTABLETYPE,
    .slots = reduce_slots,
};

PyObject *can_reduce(PyObject *module, PyObject *operation)
{
    (void)module;
    const char *name = PyUnicode_AsUTF8AndSize(operation, NULL);
    return name == NULL ? NULL : PyBool_FromLong(find_fold(name) >= 0);
}
