/* The tables of an `Exchange`: read once from what `CompiledRoute.lay_out` gives. */

#include "exchange.h"

#include <string.h>

static int require(bool is_right, const char *rule)
{
    if (!is_right && !PyErr_Occurred())
        PyErr_SetString(PyExc_ValueError, rule);
    return is_right ? 0 : -1;
}

/* Zeroed memory that lives as long as the exchange. */
static void *take(Exchange *self, size_t count, size_t size)
{
    PyObject *block = PyByteArray_FromStringAndSize(NULL, (Py_ssize_t)(count * size));
    const int status = block == NULL ? -1 : PyList_Append(self->held, block);
    Py_XDECREF(block);
    return status ? NULL : memset(PyByteArray_AsString(block), 0, count * size);
}

typedef int (*ReadOne)(Exchange *self, PyObject *spec, void *made);

/* Reads a tuple into a table with an entry for each of its items; NULL with an error. */
static void *read_each(Exchange *self, PyObject *specs, size_t size, ReadOne read_one, int *count)
{
    if (require(PyTuple_Check(specs), "a table is a tuple"))
        return NULL;
    const int wanted = *count = (int)PyTuple_Size(specs);
    char *table = take(self, (size_t)wanted, size);
    for (int at = 0; table && at < wanted; at++)
        if (read_one(self, PyTuple_GetItem(specs, at), table + (size_t)at * size))
            return NULL;
    return PyErr_Occurred() ? NULL : table;
}

static void *as_address(PyObject *value)
{
    return value == Py_None ? NULL : PyLong_AsVoidPtr(value);
}

/* Reads a number for each step of a loop, or None. */
static int read_steps(Exchange *self, PyObject *bytes, int64_t count, const int64_t **steps)
{
    if (bytes == Py_None)
        return 0;
    if (require(PyBytes_Check(bytes) && PyBytes_Size(bytes) == count * 8,
                "a table has a place for each step"))
        return -1;
    void *made = take(self, (size_t)count, 8);
    *steps = made ? memcpy(made, PyBytes_AsString(bytes), (size_t)count * 8) : NULL;
    return made ? 0 : -1;
}

/* Reads ``(count, to, from, to_at, from_at, nbytes_at)``. */
static int read_axis(Exchange *self, PyObject *spec, void *made)
{
    Axis *axis = made;
    long long count, to, from;
    PyObject *to_at, *from_at, *nbytes_at;
    if (!PyArg_ParseTuple(spec, "LLLOOO", &count, &to, &from, &to_at, &from_at, &nbytes_at) ||
        require(count >= 0, "a count is negative"))
        return -1;
    *axis = (Axis){.count = count, .to = to, .from = from};
    return read_steps(self, to_at, count, &axis->to_at) ||
                   read_steps(self, from_at, count, &axis->from_at) ||
                   read_steps(self, nbytes_at, count, &axis->nbytes_at)
               ? -1
               : 0;
}

static int require_runs(const Copy *copy, int at)
{
    const Axis *axis = copy->axes + at;
    if (axis->nbytes_at == NULL)
        return 0;
    if (require(copy->run && at + 1 == copy->naxes && axis->to_at && axis->from_at,
                "runs of other lengths have places, innermost"))
        return -1;
    for (int64_t place = 0; place < axis->count; place++) {
        const int64_t nbytes = axis->nbytes_at[place], run = (int64_t)copy->run;
        if (require(nbytes >= run && nbytes % run == 0, "a run has a share of a cell"))
            return -1;
    }
    return 0;
}

/* Reads an element, or None; returns whether there is one, -1 with an error. */
static int read_element(PyObject *bytes, char *element)
{
    if (bytes == Py_None)
        return 0;
    if (require(PyBytes_Check(bytes) && PyBytes_Size(bytes) <= MAX_ELEMENT, "a factor is a number"))
        return -1;
    memcpy(element, PyBytes_AsString(bytes), (size_t)PyBytes_Size(bytes));
    return 1;
}

/* Reads ``(scale, offset)``, or None. */
static int read_factors(Exchange *self, PyObject *spec, Factors **factors)
{
    PyObject *scale, *offset;
    if (spec == Py_None)
        return 0;
    if (!PyArg_ParseTuple(spec, "OO", &scale, &offset) ||
        !(*factors = take(self, 1, sizeof **factors)))
        return -1;
    const int scales = read_element(scale, (*factors)->scale);
    const int offsets = read_element(offset, (*factors)->offset);
    (*factors)->scales = scales > 0;
    (*factors)->offsets = offsets > 0;
    (*factors)->adds = self->adds;
    return scales < 0 || offsets < 0 ? -1 : 0;
}

/* Reads ``(run, to, from, axes)``, or None for no cells; behind them perhaps the number of the loop
 * that slides, the address of its count and of what is added to the offsets, and factors. */
static int read_copy(Exchange *self, PyObject *spec, Copy *copy)
{
    PyObject *axes, *slide = Py_None, *factors = Py_None;
    long long run, to, from;
    *copy = (Copy){.line = copy_line};
    if (spec == Py_None)
        return 0;
    if (!PyArg_ParseTuple(spec, "LLLO|iOO", &run, &to, &from, &axes, &copy->sliding, &slide,
                          &factors) ||
        require(run >= 0, "a run is negative") || read_factors(self, factors, &copy->factors))
        return -1;
    copy->slide = as_address(slide);
    copy->run = (size_t)run;
    copy->to = to;
    copy->from = from;
    copy->axes = read_each(self, axes, sizeof(Axis), read_axis, &copy->naxes);
    for (int at = 0; copy->axes && at < copy->naxes; at++)
        if (require_runs(copy, at))
            return -1;
    if (copy->axes && copy->slide &&
        require(copy->sliding >= 0 && copy->sliding < copy->naxes, "no loop slides"))
        return -1;
    return copy->axes ? 0 : -1;
}

/* Reads ``(offset, nbytes, to, scratch, copy)``. */
static int read_read(Exchange *self, PyObject *spec, void *made)
{
    Read *read = made;
    unsigned long long offset, nbytes;
    long long to;
    PyObject *scratch, *copy;
    if (!PyArg_ParseTuple(spec, "KKLOO", &offset, &nbytes, &to, &scratch, &copy))
        return -1;
    *read = (Read){offset, (size_t)nbytes, to, as_address(scratch), {0}};
    return read_copy(self, copy, &read->copy);
}

/* Reads ``(field, far, staged, even, odd, direct, reads)``. */
static int read_part(Exchange *self, PyObject *spec, void *made)
{
    Part *part = made;
    PyObject *staged, *even, *odd, *direct, *reads;
    if (!PyArg_ParseTuple(spec, "iiOOOOO", &part->field, &part->far, &staged, &even, &odd, &direct,
                          &reads))
        return -1;
    part->buffers[0] = as_address(even);
    part->buffers[1] = as_address(odd);
    part->is_direct = direct != Py_None;
    if (require(part->field >= 0 && part->field < self->nfields && part->far >= 0,
                "no such field") ||
        require(!part->buffers[0] == !part->buffers[1], "a buffer for each parity, or none") ||
        read_copy(self, staged, &part->staged) || read_copy(self, direct, &part->direct))
        return -1;
    if (self->is_rounded)
        part->staged.line = part->direct.line = single_line;
    part->reads = read_each(self, reads, sizeof(Read), read_read, &part->nreads);
    return part->reads ? 0 : -1;
}

static int read_extents(Exchange *self, PyObject *given, int ndim, npy_intp **extents)
{
    *extents = take(self, (size_t)ndim, sizeof(npy_intp));
    for (int axis = 0; *extents && axis < ndim; axis++)
        (*extents)[axis] = PyLong_AsSsize_t(PyTuple_GetItem(given, axis));
    return *extents && !PyErr_Occurred() ? 0 : -1;
}

/* Reads ``(dtype, shape, strides, span, is_located, numbers)``. */
static int read_field(Exchange *self, PyObject *spec, void *made)
{
    Field *field = made;
    PyObject *shape, *strides;
    unsigned long long span;
    int is_located;
    const char *numbers;
    if (!PyArg_ParseTuple(spec, "OO!O!Kpz", &field->dtype, &PyTuple_Type, &shape, &PyTuple_Type,
                          &strides, &span, &is_located, &numbers) ||
        PyList_Append(self->held, field->dtype))
        return -1;
    field->numbers = numbers ? find_adding(numbers) : NULL;
    field->span = (size_t)span;
    field->ndim = (int)PyTuple_Size(shape);
    field->is_located = is_located;
    self->is_located |= is_located;
    if (require(field->numbers || !self->adds, "the elements of a field cannot be added") ||
        require(PyTuple_Size(strides) == field->ndim, "a stride for each axis") ||
        read_extents(self, shape, field->ndim, &field->shape) ||
        read_extents(self, strides, field->ndim, &field->strides))
        return -1;
    return is_located && !(field->places = take(self, PLACES, sizeof(Place))) ? -1 : 0;
}

/* Reads ``(consumed, is_reader)``. */
static int read_receiver(Exchange *self, PyObject *spec, void *made)
{
    (void)self;
    Receiver *receiver = made;
    PyObject *consumed;
    int is_reader;
    if (!PyArg_ParseTuple(spec, "Op", &consumed, &is_reader))
        return -1;
    *receiver = (Receiver){as_address(consumed), is_reader};
    return require(receiver->consumed, "a rank has no control word");
}

/* Lets the elements of a copy be computed with, whole ones at a time, where they are. */
static int let_compute(const Exchange *self, const Adding *numbers, Copy *copy)
{
    if (!copy->factors && !self->adds)
        return 0;
    if (require(numbers, "no factors of such elements"))
        return -1;
    copy->line = copy->factors ? numbers->scaled : numbers->line;
    return require(copy->run % (copy->factors ? numbers->element_nbytes : numbers->number_nbytes) == 0,
                   "a part has a share of a number");
}

/* Reads ``(rank, control, state, pid, parts)``. */
static int read_sender(Exchange *self, PyObject *spec, void *made)
{
    Sender *sender = made;
    PyObject *control, *state, *parts;
    if (!PyArg_ParseTuple(spec, "iOOlO", &sender->rank, &control, &state, &sender->pid, &parts))
        return -1;
    sender->control = as_address(control);
    sender->state = as_address(state);
    sender->is_own = sender->control == self->ready;
    sender->parts = read_each(self, parts, sizeof(Part), read_part, &sender->nparts);
    if (!sender->parts || require(sender->control && sender->state, "a rank has no control word"))
        return -1;
    for (Part *part = sender->parts; part < sender->parts + sender->nparts; part++) {
        part->staged.line = copy_line; /* its sender rounded it */
        part->direct.takes = self->is_reverse;
        const Adding *numbers = self->fields[part->field].numbers;
        if (require(part->is_direct || (part->buffers[0] && !sender->is_own),
                    "a part comes from nowhere") ||
            require(!sender->is_own || part->far < self->nfields, "no such field of mine") ||
            let_compute(self, numbers, &part->staged) || let_compute(self, numbers, &part->direct))
            return -1;
        self->reads_windows |= part->is_direct && !sender->is_own;
    }
    return 0;
}

/* Reads a part that is sent, and taken in the reverse. */
static int read_sent(Exchange *self, PyObject *spec, void *made)
{
    Part *part = made;
    const int status = read_part(self, spec, part);
    part->staged.takes = self->is_reverse;
    return status;
}

static int read_fields(Exchange *self, PyObject *specs)
{
    self->fields = read_each(self, specs, sizeof(Field), read_field, &self->nfields);
    if (!self->fields)
        return -1;
    const size_t nfields = (size_t)self->nfields;
    self->bases = take(self, nfields, sizeof(char *));
    self->apart = take(self, nfields, sizeof(intptr_t));
    self->found = take(self, nfields, sizeof(Place *));
    self->entries = take(self, nfields * ENTRY_WORDS, sizeof(uint64_t));
    self->mapped = take(self, PLACES, sizeof(Mapped));
    self->table_words = 1 + ENTRY_WORDS * nfields;
    for (int at = 0; self->apart && at < self->nfields; at++)
        self->apart[at] = INTPTR_MIN; /* of no two fields */
    return PyErr_Occurred() ? -1 : 0;
}

int exchange_make(Exchange *self, PyObject *arguments, PyObject *keywords)
{
    static char *names[] = {"owner",      "context",    "agreement", "life",
                            "recordings", "array_type", "words",     "fields",
                            "receivers",  "senders",    "out",       "adds",
                            "is_reverse", "is_rounded", "nbytes",    "looks_per_yield",
                            NULL};
    PyObject *owner, *fields, *receivers, *senders, *out;
    unsigned long long ready, consumed, even, odd;
    int adds, is_reverse, is_rounded;
    if (!PyArg_ParseTupleAndKeywords(
            arguments, keywords, "OOOOO!O(KKKK)OOOOpppni", names, &owner, &self->context,
            &self->agreement, &self->life, &PyList_Type, &self->recordings, &self->array_type,
            &ready, &consumed, &even, &odd, &fields, &receivers, &senders, &out, &adds, &is_reverse,
            &is_rounded, &self->nbytes, &self->looks_per_yield))
        return -1;
    self->owner = Py_NewRef(owner);
    self->held = Py_BuildValue("[OOOOO]", self->context, self->agreement, self->life,
                               self->recordings, self->array_type);
    if (self->held == NULL || require_looks(self->looks_per_yield))
        return -1;
    self->ready = (Word *)(uintptr_t)ready;
    self->consumed = (Word *)(uintptr_t)consumed;
    self->tables[0] = (uint64_t *)(uintptr_t)even;
    self->tables[1] = (uint64_t *)(uintptr_t)odd;
    self->windows_version = -1;
    self->adds = adds;
    self->is_reverse = is_reverse;
    self->is_rounded = is_rounded;
    if (read_fields(self, fields) ||
        !(self->receivers = read_each(self, receivers, sizeof(Receiver), read_receiver,
                                      &self->nreceivers)) ||
        !(self->senders = read_each(self, senders, sizeof(Sender), read_sender,
                                    &self->nsenders)) ||
        !(self->out = read_each(self, out, sizeof(Part), read_sent, &self->nout)))
        return -1;
    return 0;
}
