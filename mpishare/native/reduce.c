/* The reduction of fields through slots: a rank copies its elements into its slot, all meet, and each
 * folds the slots of all, in the order of the ranks. Or it folds a share of them, puts the result
 * into its slot, whose share nobody else reads before that, and all meet once more for those of the
 * others. The words and the shares are those of mpishare.reduction.slots. */

#define NPY_NO_DEPRECATED_API NPY_1_7_API_VERSION
#include "wait.h"
#include "exact.h"
#include "numbers.h"
#include <numpy/arrayobject.h>
#include <string.h>

typedef void (*Fold)(void *into, void *const *from, Py_ssize_t nranks, Py_ssize_t count);

typedef struct {
    PyObject_HEAD
    char *memory;    /* as `Slots` lays it out: see `control_of` and `slot_of` */
    size_t stride;   /* bytes from slot to slot */
    void **operands; /* of a fold */
    void *unaligned; /* room for a result, if the field is not aligned */
    PyObject *array_type, *dtype;
    Py_ssize_t nelements; /* of a slot */
    Py_ssize_t nranks, place;
    Py_ssize_t width; /* numbers of an element: one or two */
    size_t itemsize;
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

#define EACH_OF_NUMBERS(DO, number, type)                                                          \
    DO(sum, number, type) DO(prod, number, type) DO(max, number, type) DO(min, number, type)
#define EACH_OF_BITS(DO, number, type)                                                             \
    DO(land, number, type) DO(lor, number, type) DO(lxor, number, type)                            \
    DO(band, number, type) DO(bor, number, type) DO(bxor, number, type)

#define FOLDS(number, type, wide) EACH_OF_NUMBERS(FOLD, number, type)
#define FOLDS_OF_BITS(number, type, wide) EACH_OF_BITS(FOLD, number, type)

EACH_NUMBER(FOLDS)
EACH_INTEGER(FOLDS_OF_BITS)

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

/* Complex numbers by their parts, each rounded alone: NumPy fuses some where the processor can. */
#define MULTIPLY(pair)                                                                             \
    static inline pair prod_##pair(pair a, pair b)                                                 \
    {                                                                                              \
        return (pair){a.value * b.value - a.index * b.index,                                       \
                      a.value * b.index + a.index * b.value};                                      \
    }                                                                                              \
    FOLD(prod, pair, pair)

#define PAIRS(pair, number, type)                                                                  \
    typedef struct {                                                                               \
        type value, index; /* or the parts of a complex number */                                  \
    } pair;                                                                                        \
    LOCATE(maxloc, pair, pair, >)                                                                  \
    LOCATE(minloc, pair, pair, <)                                                                  \
    MULTIPLY(pair)

EACH_PAIR(PAIRS)

#define ROW(operation, number, type)                                                               \
    {#operation " " #number, fold_##operation##_##number, sizeof(type)},
#define ROWS(number, type, wide) EACH_OF_NUMBERS(ROW, number, type)
#define ROWS_OF_BITS(number, type, wide) EACH_OF_BITS(ROW, number, type)
#define ROWS_OF_PAIRS(pair, number, type)                                                          \
    {"sum " #pair, fold_sum_##number, sizeof(type)},                                               \
        ROW(prod, pair, pair) ROW(maxloc, pair, pair) ROW(minloc, pair, pair)

static const struct {
    const char *name;
    Fold fold;
    size_t nbytes;
} folds[] = {EACH_NUMBER(ROWS) EACH_INTEGER(ROWS_OF_BITS) EACH_PAIR(ROWS_OF_PAIRS)
                 ROW(exact, float64, double) ROW(exact, float32, float)
                 ROW(exact, bfloat16, bfloat16_t)};

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
    PyMem_Free(self->operands);
    PyMem_Free(self->unaligned);
    Py_CLEAR(self->array_type);
    Py_CLEAR(self->dtype);
    free_object(self);
}

enum { SLOT_NBYTES = 128 }; /* as in mpishare.coordination.counters */

/* The words of a rank for even and for odd epochs. */
static Word *control_of(const Reduce *self, Py_ssize_t rank)
{
    return (Word *)(void *)(self->memory + rank * SLOT_NBYTES);
}

/* The elements of a rank in an even or an odd use, behind the words of all ranks. */
static char *slot_of(const Reduce *self, long parity, Py_ssize_t rank)
{
    return self->memory + self->nranks * SLOT_NBYTES +
           (size_t)(parity * self->nranks + rank) * self->stride;
}

/* Takes the address of the memory of all ranks. */
static int read_memory(Reduce *self, PyObject *buffer)
{
    Py_buffer view;
    if (PyObject_GetBuffer(buffer, &view, PyBUF_WRITABLE))
        return -1;
    const size_t nbytes = (size_t)self->nelements * self->itemsize;
    self->memory = view.buf;
    self->stride = (nbytes + SLOT_NBYTES - 1) / SLOT_NBYTES * SLOT_NBYTES;
    const size_t of_rank = (size_t)view.len / (size_t)self->nranks;
    PyBuffer_Release(&view); /* the caller sees to it that the memory stays */
    if (of_rank < SLOT_NBYTES + 2 * self->stride) {
        PyErr_Format(PyExc_ValueError, "a rank has %zu bytes of memory", of_rank);
        return -1;
    }
    self->operands = PyMem_Calloc((size_t)self->nranks, sizeof *self->operands);
    self->unaligned = PyMem_Malloc(nbytes);
    if (self->operands == NULL || self->unaligned == NULL)
        PyErr_NoMemory();
    return PyErr_Occurred() ? -1 : 0;
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
    if ((itemsize != nbytes && itemsize != 2 * nbytes) || self->nelements < 0 ||
        self->nelements > PY_SSIZE_T_MAX / itemsize / 4) {
        PyErr_Format(PyExc_ValueError, "%s of %zd elements of %zd bytes", operation,
                     self->nelements, itemsize);
        return -1;
    }
    self->fold = folds[row].fold;
    self->itemsize = (size_t)itemsize;
    self->width = itemsize / nbytes;
    return 0;
}

static int read_arguments(Reduce *self, PyObject *arguments, PyObject *keywords)
{
    static char *names[] = {"operation", "array_type", "dtype",           "nelements", "nranks",
                            "place",     "memory",     "looks_per_yield", NULL};
    const char *operation;
    PyObject *array_type, *dtype, *memory;
    if (!PyArg_ParseTupleAndKeywords(arguments, keywords, "sOOnnnOi", names, &operation,
                                     &array_type, &dtype, &self->nelements, &self->nranks,
                                     &self->place, &memory, &self->looks_per_yield) ||
        require_looks(self->looks_per_yield))
        return -1;
    self->array_type = Py_NewRef(array_type);
    self->dtype = Py_NewRef(dtype);
    if (self->place < 0 || self->place >= self->nranks) {
        PyErr_Format(PyExc_ValueError, "there is no place %zd", self->place);
        return -1;
    }
    return read_operation(self, operation) || read_memory(self, memory) ? -1 : 0;
}

static PyObject *reduce_new(PyTypeObject *type, PyObject *arguments, PyObject *keywords)
{
    Reduce *self = (Reduce *)PyType_GenericAlloc(type, 0);
    if (self != NULL && read_arguments(self, arguments, keywords))
        Py_CLEAR(self);
    return (PyObject *)self;
}

/* Whether it is a packed array of elements that a slot has room for; -1 on errors. */
static int fits(const Reduce *self, PyObject *given, Py_ssize_t *nelements)
{
    PyArrayObject *array = (PyArrayObject *)given;
    if ((PyObject *)Py_TYPE(given) != self->array_type ||
        !(PyArray_FLAGS(array) & NPY_ARRAY_WRITEABLE) ||
        !(PyArray_FLAGS(array) & (NPY_ARRAY_C_CONTIGUOUS | NPY_ARRAY_F_CONTIGUOUS)))
        return 0;
    *nelements = 1;
    for (int axis = 0; axis < PyArray_NDIM(array); axis++)
        *nelements *= PyArray_DIMS(array)[axis];
    if (*nelements > self->nelements)
        return 0;
    PyObject *dtype = (PyObject *)PyArray_DESCR(array);
    return dtype == self->dtype ? 1 : PyObject_RichCompareBool(dtype, self->dtype, Py_EQ);
}

/* Whether all ranks have come to the epoch of a word, and in the same call. */
static bool have_met(Reduce *self, uint64_t value)
{
    for (Py_ssize_t rank = 0; rank < self->nranks; rank++) {
        const Word *word = control_of(self, rank) + (value >> 1 & 1);
        if (!wait_word(word, value & ~(uint64_t)1, self->looks_per_yield) ||
            load_acquire(word) != value)
            return false;
    }
    return true;
}

typedef struct {
    size_t begin, nbytes;
} Share;

/* What a rank folds: whole pairs of cache lines but for the last rank's. */
static Share share_of(const Reduce *self, Py_ssize_t nelements, Py_ssize_t place)
{
    const Py_ssize_t line = (Py_ssize_t)(SLOT_NBYTES / self->itemsize);
    const Py_ssize_t begin = nelements * place / self->nranks / line * line;
    const Py_ssize_t end = place == self->nranks - 1
                               ? nelements
                               : nelements * (place + 1) / self->nranks / line * line;
    return (Share){(size_t)begin * self->itemsize, (size_t)(end - begin) * self->itemsize};
}

/* Folds a share of the slots into the same place of the field. */
static void fold_share(Reduce *self, char *field, long parity, Share share, bool is_aligned)
{
    for (Py_ssize_t rank = 0; rank < self->nranks; rank++)
        self->operands[rank] = slot_of(self, parity, rank) + share.begin;
    void *into = is_aligned ? field + share.begin : self->unaligned;
    const Py_ssize_t count = (Py_ssize_t)(share.nbytes / self->itemsize) * self->width;
    self->fold(into, self->operands, self->nranks, count);
    if (!is_aligned)
        memcpy(field + share.begin, into, share.nbytes);
}

static PyObject *reduce_reduce(Reduce *self, PyObject *const *given, Py_ssize_t count)
{
    if (count != 4)
        return PyErr_Format(PyExc_TypeError, "an array, a parity, a word, and a bool are needed");
    Py_ssize_t nelements;
    const int is_ours = fits(self, given[0], &nelements);
    if (is_ours <= 0)
        return is_ours ? NULL : PyErr_Format(PyExc_TypeError, "the array is not of this reduction");
    PyArrayObject *array = (PyArrayObject *)given[0];
    const long parity = PyLong_AsLong(given[1]) & 1;
    const uint64_t value = PyLong_AsUnsignedLongLong(given[2]), last = value + 2;
    const int is_shared = PyObject_IsTrue(given[3]);
    if (PyErr_Occurred())
        return NULL;
    char *field = PyArray_DATA(array);
    char *slot = slot_of(self, parity, self->place);
    const bool is_aligned = PyArray_FLAGS(array) & NPY_ARRAY_ALIGNED;
    Word *first_word = control_of(self, self->place) + (value >> 1 & 1);
    Word *last_word = control_of(self, self->place) + (last >> 1 & 1);
    const Share whole = {0, (size_t)nelements * self->itemsize};
    /* Called again after a wait, it goes on where it was: the others may read the slot. */
    if (!is_shared || load_acquire(last_word) != last) {
        if (load_acquire(first_word) != value) {
            memcpy(slot, field, whole.nbytes);
            store_release(first_word, value);
        }
        if (!have_met(self, value))
            return PyLong_FromUnsignedLongLong(value);
        const Share mine = is_shared ? share_of(self, nelements, self->place) : whole;
        fold_share(self, field, parity, mine, is_aligned);
        if (!is_shared)
            Py_RETURN_NONE;
        memcpy(slot + mine.begin, field + mine.begin, mine.nbytes);
        store_release(last_word, last);
    }
    if (!have_met(self, last))
        return PyLong_FromUnsignedLongLong(last);
    for (Py_ssize_t at = 1; at < self->nranks; at++) { /* no two begin at the same slot */
        const Py_ssize_t rank = (self->place + at) % self->nranks;
        const Share theirs = share_of(self, nelements, rank);
        memcpy(field + theirs.begin, slot_of(self, parity, rank) + theirs.begin, theirs.nbytes);
    }
    Py_RETURN_NONE;
}

static PyMethodDef reduce_methods[] = {
    {"reduce", (PyCFunction)(void (*)(void))reduce_reduce, METH_FASTCALL,
     "reduce(array, parity, word, is_shared): combine the arrays of all ranks, in that use of the "
     "slots, with that word in control, and that of the next epoch if each folds a share. Return "
     "None if it is done; else the word of an epoch in which a rank has not come within a "
     "millisecond, or has made another call."},
    {NULL, NULL, 0, NULL},
};

static PyType_Slot reduce_slots[] = {
    {Py_tp_doc, "Reduce(operation, array_type, dtype, nelements, nranks, place, memory, "
                "looks_per_yield)"},
    {Py_tp_new, reduce_new},
    {Py_tp_dealloc, reduce_dealloc},
    {Py_tp_methods, reduce_methods},
    {0, NULL},
};

PyType_Spec reduce_spec = {
    .name = "mpishare.native._host.Reduce",
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

PyObject *fold_elements(PyObject *module, PyObject *given)
{
    (void)module;
    const char *operation;
    unsigned long long into;
    PyObject *operands;
    Py_ssize_t count;
    if (!PyArg_ParseTuple(given, "sKO!n", &operation, &into, &PyTuple_Type, &operands, &count))
        return NULL;
    const int row = find_fold(operation);
    if (row < 0)
        return PyErr_Format(PyExc_ValueError, "%s is not compiled", operation);
    const Py_ssize_t nranks = PyTuple_Size(operands);
    void **from = PyMem_Calloc((size_t)nranks, sizeof *from);
    if (from == NULL)
        return PyErr_NoMemory();
    for (Py_ssize_t rank = 0; rank < nranks; rank++)
        from[rank] = PyLong_AsVoidPtr(PyTuple_GetItem(operands, rank));
    if (!PyErr_Occurred())
        folds[row].fold((void *)(uintptr_t)into, from, nranks, count);
    PyMem_Free(from);
    if (PyErr_Occurred())
        return NULL;
    Py_RETURN_NONE;
}
