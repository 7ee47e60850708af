/* The tables of an `Exchange`: read once from what `CompiledRoute.lay_out` gives. */

#include "exchange.h"

#include <string.h>

/* Memory that lives as long as the exchange. */
static void *take(Exchange *self, size_t count, size_t size)
{
    void **blocks = PyMem_Realloc(self->blocks, (self->nblocks + 1) * sizeof(void *));
    if (blocks == NULL) {
        PyErr_NoMemory();
        return NULL;
    }
    self->blocks = blocks;
    void *block = PyMem_Calloc(count ? count : 1, size);
    if (block == NULL) {
        PyErr_NoMemory();
        return NULL;
    }
    self->blocks[self->nblocks++] = block;
    return block;
}

static void *as_address(PyObject *value)
{
    return value == Py_None ? NULL : PyLong_AsVoidPtr(value);
}

static int require_word(const Word *word)
{
    if (word == NULL && !PyErr_Occurred())
        PyErr_SetString(PyExc_ValueError, "a rank has no control word");
    return PyErr_Occurred() ? -1 : 0;
}

static int64_t *copy_table(Exchange *self, PyObject *bytes, int64_t count)
{
    if (!PyBytes_Check(bytes) || PyBytes_Size(bytes) != count * 8) {
        PyErr_SetString(PyExc_ValueError, "a table has a place for each step");
        return NULL;
    }
    int64_t *table = take(self, (size_t)count, 8);
    if (table)
        memcpy(table, PyBytes_AsString(bytes), (size_t)count * 8);
    return table;
}

/* Reads ``(run, to, from, ((count, to, from, to_at, from_at, nbytes_at), ...))``. */
static int read_copy(Exchange *self, PyObject *spec, Copy *copy)
{
    PyObject *axes;
    long long run, to, from;
    if (!PyArg_ParseTuple(spec, "LLLO!", &run, &to, &from, &PyTuple_Type, &axes))
        return -1;
    if (run < 0) {
        PyErr_SetString(PyExc_ValueError, "a run is negative");
        return -1;
    }
    const int naxes = (int)PyTuple_Size(axes);
    Axis *made = take(self, (size_t)naxes, sizeof(Axis));
    if (made == NULL)
        return -1;
    for (int at = 0; at < naxes; at++) {
        long long count, to_step, from_step;
        PyObject *to_at, *from_at, *nbytes_at;
        if (!PyArg_ParseTuple(PyTuple_GetItem(axes, at), "LLLOOO", &count, &to_step, &from_step,
                              &to_at, &from_at, &nbytes_at))
            return -1;
        if (count < 0) {
            PyErr_SetString(PyExc_ValueError, "a count is negative");
            return -1;
        }
        made[at] = (Axis){count, to_step, from_step, NULL, NULL, NULL};
        if (to_at != Py_None && !(made[at].to_at = copy_table(self, to_at, count)))
            return -1;
        if (from_at != Py_None && !(made[at].from_at = copy_table(self, from_at, count)))
            return -1;
        if (nbytes_at != Py_None) {
            if (run < 1 || at + 1 < naxes || !made[at].to_at || !made[at].from_at) {
                PyErr_SetString(PyExc_ValueError, "runs of other lengths have places, innermost");
                return -1;
            }
            if (!(made[at].nbytes_at = copy_table(self, nbytes_at, count)))
                return -1;
            for (int64_t place = 0; place < count; place++)
                if (made[at].nbytes_at[place] < run || made[at].nbytes_at[place] % run) {
                    PyErr_SetString(PyExc_ValueError, "a run has a share of a cell");
                    return -1;
                }
        }
    }
    *copy = (Copy){copy_line, (size_t)run, to, from, naxes, made};
    return 0;
}

/* Reads ``(field, far, staged, even, odd, direct, reads)``. */
static int read_part(Exchange *self, PyObject *spec, Part *part)
{
    PyObject *staged, *even, *odd, *direct, *reads;
    if (!PyArg_ParseTuple(spec, "iiOOOOO!", &part->field, &part->far, &staged, &even, &odd, &direct,
                          &PyTuple_Type, &reads))
        return -1;
    if (part->field < 0 || part->field >= self->nfields || part->far < 0 ||
        part->far >= self->nfields) {
        PyErr_SetString(PyExc_ValueError, "no such field");
        return -1;
    }
    part->buffers[0] = as_address(even);
    part->buffers[1] = as_address(odd);
    part->staged.line = part->direct.line = copy_line; /* of no cells */
    if (!part->buffers[0] != !part->buffers[1]) {
        PyErr_SetString(PyExc_ValueError, "a buffer for each parity, or none");
        return -1;
    }
    if (staged != Py_None && read_copy(self, staged, &part->staged))
        return -1;
    part->is_direct = direct != Py_None;
    if (part->is_direct && read_copy(self, direct, &part->direct))
        return -1;
    part->nreads = (int)PyTuple_Size(reads);
    part->reads = take(self, (size_t)part->nreads, sizeof(Read));
    if (part->reads == NULL)
        return -1;
    for (int at = 0; at < part->nreads; at++) {
        Read *read = part->reads + at;
        unsigned long long offset, nbytes;
        long long to;
        PyObject *scratch, *copy;
        if (!PyArg_ParseTuple(PyTuple_GetItem(reads, at), "KKLOO", &offset, &nbytes, &to, &scratch,
                              &copy))
            return -1;
        *read = (Read){offset, (size_t)nbytes, to, as_address(scratch), {.line = copy_line}};
        if (copy != Py_None && read_copy(self, copy, &read->copy))
            return -1;
    }
    return PyErr_Occurred() ? -1 : 0;
}

static Part *read_parts(Exchange *self, PyObject *specs, int *nparts)
{
    if (!PyTuple_Check(specs)) {
        PyErr_SetString(PyExc_TypeError, "parts are a tuple");
        return NULL;
    }
    *nparts = (int)PyTuple_Size(specs);
    Part *parts = take(self, (size_t)*nparts, sizeof(Part));
    for (int at = 0; parts && at < *nparts; at++)
        if (read_part(self, PyTuple_GetItem(specs, at), parts + at))
            return NULL;
    return parts;
}

static int read_field(Exchange *self, PyObject *spec, Field *field)
{
    PyObject *dtype, *shape, *strides;
    unsigned long long span;
    int is_located;
    const char *numbers;
    if (!PyArg_ParseTuple(spec, "OO!O!Kpz", &dtype, &PyTuple_Type, &shape, &PyTuple_Type, &strides,
                          &span, &is_located, &numbers))
        return -1;
    field->span = (size_t)span;
    field->dtype = Py_NewRef(dtype);
    const Adding *adding = numbers ? find_adding(numbers) : NULL;
    if (adding) {
        field->add = adding->line;
        field->number_nbytes = adding->number_nbytes;
    } else if (self->is_reverse) {
        PyErr_SetString(PyExc_ValueError, "the elements of a field cannot be added");
        return -1;
    }
    field->ndim = (int)PyTuple_Size(shape);
    if (PyTuple_Size(strides) != field->ndim) {
        PyErr_SetString(PyExc_ValueError, "a stride for each axis");
        return -1;
    }
    field->shape = take(self, (size_t)field->ndim, sizeof(npy_intp));
    field->strides = take(self, (size_t)field->ndim, sizeof(npy_intp));
    if (!field->shape || !field->strides)
        return -1;
    for (int axis = 0; axis < field->ndim; axis++) {
        field->shape[axis] = PyLong_AsSsize_t(PyTuple_GetItem(shape, axis));
        field->strides[axis] = PyLong_AsSsize_t(PyTuple_GetItem(strides, axis));
    }
    field->is_located = is_located;
    self->is_located |= is_located;
    if (is_located && !(field->places = take(self, PLACES, sizeof(Place))))
        return -1;
    return PyErr_Occurred() ? -1 : 0;
}

/* Reads ``(consumed, is_reader)`` of each. */
static int read_receivers(Exchange *self, PyObject *specs)
{
    self->nreceivers = (int)PyTuple_Size(specs);
    self->receivers = take(self, (size_t)self->nreceivers, sizeof(Receiver));
    for (int at = 0; self->receivers && at < self->nreceivers; at++) {
        PyObject *consumed;
        int is_reader;
        if (!PyArg_ParseTuple(PyTuple_GetItem(specs, at), "Op", &consumed, &is_reader))
            return -1;
        self->receivers[at] = (Receiver){as_address(consumed), is_reader};
        if (require_word(self->receivers[at].consumed))
            return -1;
    }
    return self->receivers == NULL || PyErr_Occurred() ? -1 : 0;
}

/* Lets a part be added to the field, whole numbers at a time. */
static int let_add(const Field *field, Part *part)
{
    if (part->staged.run % field->number_nbytes || part->direct.run % field->number_nbytes) {
        PyErr_SetString(PyExc_ValueError, "a part has a share of a number");
        return -1;
    }
    part->staged.line = part->direct.line = field->add;
    return 0;
}

/* Reads ``(rank, control, state, (lock_fd, lock_offset), pid, parts)`` of each. */
static int read_senders(Exchange *self, PyObject *specs)
{
    self->nsenders = (int)PyTuple_Size(specs);
    self->senders = take(self, (size_t)self->nsenders, sizeof(Sender));
    for (int at = 0; self->senders && at < self->nsenders; at++) {
        Sender *sender = self->senders + at;
        PyObject *control, *state, *parts;
        if (!PyArg_ParseTuple(PyTuple_GetItem(specs, at), "iOO(iL)lO", &sender->rank,
                              &control, &state, &sender->lock_fd, &sender->lock_offset,
                              &sender->pid, &parts))
            return -1;
        sender->control = as_address(control);
        sender->state = as_address(state);
        if (require_word(sender->control) || require_word(sender->state) ||
            !(sender->parts = read_parts(self, parts, &sender->nparts)))
            return -1;
        sender->is_own = sender->control == self->ready;
        for (int number = 0; number < sender->nparts; number++) {
            Part *part = sender->parts + number;
            if (!part->is_direct && (sender->is_own || !part->buffers[0])) {
                PyErr_SetString(PyExc_ValueError, "a part comes from nowhere");
                return -1;
            }
            if (self->is_reverse && let_add(self->fields + part->field, part))
                return -1;
            self->reads_windows |= part->is_direct && !sender->is_own;
        }
    }
    return self->senders == NULL ? -1 : 0;
}

static int read_fields(Exchange *self, PyObject *specs)
{
    const size_t nfields = (size_t)PyTuple_Size(specs);
    self->fields = take(self, nfields, sizeof(Field));
    self->bases = take(self, nfields, sizeof(char *));
    self->apart = take(self, nfields, sizeof(intptr_t));
    self->found = take(self, nfields, sizeof(Place *));
    self->entries = take(self, nfields * ENTRY_WORDS, sizeof(uint64_t));
    self->mapped = take(self, PLACES, sizeof(Mapped));
    if (PyErr_Occurred())
        return -1;
    for (size_t at = 0; at < nfields; at++) {
        self->nfields++; /* `exchange_free` lets go of its dtype, whatever fails here */
        self->apart[at] = INTPTR_MIN; /* of no two fields */
        if (read_field(self, PyTuple_GetItem(specs, at), self->fields + at))
            return -1;
    }
    self->table_words = 1 + ENTRY_WORDS * nfields;
    return 0;
}

/* Reads parts that are set to zero where they are. */
static int read_zeroed(Exchange *self, PyObject *specs)
{
    self->zeroed = read_parts(self, specs, &self->nzeroed);
    for (int at = 0; self->zeroed && at < self->nzeroed; at++) {
        if (!self->zeroed[at].is_direct) {
            PyErr_SetString(PyExc_ValueError, "a part that is zeroed is nowhere");
            return -1;
        }
        self->zeroed[at].direct.line = zero_line;
    }
    return self->zeroed == NULL ? -1 : 0;
}

int exchange_make(Exchange *self, PyObject *arguments, PyObject *keywords)
{
    static char *names[] = {"owner",      "context",    "agreement", "recordings",
                            "array_type", "busy",       "words",     "fields",
                            "receivers",  "senders",    "out",       "zeroed",
                            "is_reverse", "nbytes",     "looks_per_yield", NULL};
    PyObject *fields, *receivers, *senders, *out, *zeroed;
    unsigned long long ready, consumed, even, odd;
    int is_reverse;
    if (!PyArg_ParseTupleAndKeywords(
            arguments, keywords, "OOOO!OO!(KKKK)O!O!O!OOpni", names, &self->owner, &self->context,
            &self->agreement, &PyList_Type, &self->recordings, &self->array_type,
            &PyByteArray_Type, &self->busy_mark, &ready, &consumed, &even, &odd, &PyTuple_Type,
            &fields, &PyTuple_Type, &receivers, &PyTuple_Type, &senders, &out, &zeroed, &is_reverse,
            &self->nbytes, &self->looks_per_yield)) {
        self->owner = self->context = self->agreement = NULL;
        self->recordings = self->array_type = self->busy_mark = NULL;
        return -1;
    }
    Py_INCREF(self->owner);
    Py_INCREF(self->context);
    Py_INCREF(self->agreement);
    Py_INCREF(self->recordings);
    Py_INCREF(self->array_type);
    Py_INCREF(self->busy_mark);
    if (PyByteArray_Size(self->busy_mark) != 1) {
        PyErr_SetString(PyExc_ValueError, "the mark of a call is one byte");
        return -1;
    }
    self->busy = PyByteArray_AsString(self->busy_mark);
    self->ready = (Word *)(uintptr_t)ready;
    self->consumed = (Word *)(uintptr_t)consumed;
    self->tables[0] = (uint64_t *)(uintptr_t)even;
    self->tables[1] = (uint64_t *)(uintptr_t)odd;
    self->windows_version = -1;
    self->is_reverse = is_reverse;
    if (require_looks(self->looks_per_yield) || read_fields(self, fields) ||
        read_receivers(self, receivers) || read_senders(self, senders) ||
        !(self->out = read_parts(self, out, &self->nout)) || read_zeroed(self, zeroed))
        return -1;
    return 0;
}

void exchange_free(Exchange *self)
{
    Py_CLEAR(self->recordings);
    Py_CLEAR(self->array_type);
    Py_CLEAR(self->busy_mark);
    for (int at = 0; at < self->nfields; at++)
        Py_CLEAR(self->fields[at].dtype);
    for (size_t at = 0; at < self->nblocks; at++)
        PyMem_Free(self->blocks[at]);
    PyMem_Free(self->blocks);
    self->blocks = NULL;
    self->nfields = 0;
    self->nblocks = 0;
}
