/* The two halves of an `Exchange`: my cells go out, the ghosts come in. The protocol is that of
 * `mpishare.plans.exchange.host.staging`; Python makes the tables, waits for what takes long, and raises.
 *
 * Nothing here holds memory of others: addresses of shared memory are valid until `close`. */

#define _GNU_SOURCE
#include "exchange.h"

#include <errno.h>
#include <string.h>
#include <sys/uio.h>

enum { STAGED = 0 }; /* windows of a field's address that are none: as in `staging.py` */
#define IN_PROCESS ((uint64_t)1 << 63)

/* --- the GIL */

static void release_gil(Exchange *self)
{
    if (self->released == NULL)
        self->released = PyEval_SaveThread();
}

/* Before copies: other threads of this process go on meanwhile. */
static void release_gil_if_large(Exchange *self)
{
    if (self->nbytes > GIL_NBYTES)
        release_gil(self);
}

void exchange_hold_gil(Exchange *self)
{
    if (self->released != NULL) {
        PyEval_RestoreThread(self->released);
        self->released = NULL;
    }
}

/* Calls a method of the owner: a route of `mpishare.plans.exchange.host`. Meanwhile the node takes no
 * calls of its thread: one of a handler of a signal would come amid this one. */
static PyObject *ask(Exchange *self, const char *name, const char *format, ...)
{
    static PyObject *thread_name;
    exchange_hold_gil(self);
    PyObject *thread = attribute(self->agreement, &thread_name, "thread"), *answer = NULL;
    PyObject *method = thread == NULL ? NULL : PyObject_GetAttrString(self->owner, name);
    va_list arguments;
    va_start(arguments, format);
    PyObject *values = method == NULL ? NULL : Py_VaBuildValue(format, arguments);
    va_end(arguments);
    if (values != NULL && !PyObject_SetAttr(self->agreement, thread_name, Py_False)) {
        PyObject *type, *error, *trace;
        answer = PyObject_CallObject(method, values);
        PyErr_Fetch(&type, &error, &trace);
        PyObject_SetAttr(self->agreement, thread_name, thread);
        PyErr_Restore(type, error, trace);
    }
    Py_XDECREF(values);
    Py_XDECREF(method);
    Py_XDECREF(thread);
    return answer;
}

static int tell(Exchange *self, const char *name, int64_t rank, int64_t value)
{
    PyObject *answer = ask(self, name, "(LL)", (long long)rank, (long long)value);
    Py_XDECREF(answer);
    return answer == NULL ? -1 : 0;
}

/* --- waits */

static bool all_consumed(Exchange *self, uint64_t epoch, bool readers_only)
{
    for (int at = 0; at < self->nreceivers; at++)
        if ((!readers_only || self->receivers[at].is_reader) &&
            load_acquire(self->receivers[at].consumed) < epoch)
            return false;
    return true;
}

static bool is_two_behind(void *exchange)
{
    Exchange *self = exchange;
    return self->epoch < 3 || all_consumed(self, self->epoch - 2, false);
}

static bool is_read(void *exchange)
{
    Exchange *self = exchange;
    return all_consumed(self, self->epoch, true);
}

static bool any_ready(void *exchange)
{
    Exchange *self = exchange;
    bool is_done = true;
    for (int at = 0; at < self->nsenders; at++) {
        Sender *sender = self->senders + at;
        if (!sender->is_done) {
            if (load_acquire(sender->control) >= self->epoch)
                return true;
            is_done = false;
            if (self->is_reverse) /* none is overtaken */
                break;
        }
    }
    return is_done;
}

/* Waits; after a little, Python does, which raises where that is in vain. */
static int wait_until(Exchange *self, Done is_done, const char *method)
{
    if (is_done(self))
        return 0;
    while (!wait_a_little(is_done, self, self->looks_per_yield, &self->released))
        if (tell(self, method, 0, (int64_t)self->epoch))
            return -1;
    return 0;
}

/* --- where memory is */

/* Forgets where memory is, if a window was opened or closed since. */
static int look_at_windows(Exchange *self)
{
    static PyObject *name;
    exchange_hold_gil(self);
    PyObject *value = attribute(self->context, &name, "windows_version");
    if (value == NULL)
        return -1;
    const long long version = PyLong_AsLongLong(value);
    Py_DECREF(value);
    if (version == self->windows_version)
        return 0;
    if (version == -1 && PyErr_Occurred())
        return -1;
    for (int at = 0; at < self->nfields; at++)
        if (self->fields[at].places)
            memset(self->fields[at].places, 0, PLACES * sizeof(Place));
    memset(self->mapped, 0, PLACES * sizeof(Mapped));
    self->windows_version = version;
    return 0;
}

static unsigned place_of(uint64_t value)
{
    return (unsigned)((value * UINT64_C(0x9E3779B97F4A7C15)) >> 58);
}

_Static_assert(PLACES == 64, "place_of returns six bits");

/* Finds out where others read a field of mine at this address. */
static int locate(Exchange *self, int number)
{
    char *address = self->bases[number];
    Place *place = self->fields[number].places + place_of((uint64_t)(uintptr_t)address >> 4);
    if (place->address != address) {
        PyObject *answer = ask(self, "locate", "(iK)", number,
                               (unsigned long long)(uintptr_t)address);
        if (answer == NULL)
            return -1;
        unsigned long long window, segment, offset, shadow;
        const int is_read = PyArg_ParseTuple(answer, "KKKK", &window, &segment, &offset, &shadow);
        Py_DECREF(answer);
        if (!is_read)
            return -1;
        *place = (Place){address, {window, segment, offset}, (char *)(uintptr_t)shadow};
    }
    self->found[number] = place;
    return 0;
}

/* --- sending */

/* Writes where my fields are, if that is not what is there for this parity; before that, whether
 * any is not staged. */
static void publish(Exchange *self)
{
    uint64_t *table = self->tables[self->epoch & 1];
    uint64_t *entries = self->entries;
    bool any = false;
    for (int at = 0; at < self->nfields; at++, entries += ENTRY_WORDS) {
        if (self->found[at])
            memcpy(entries, self->found[at]->entry, ENTRY_WORDS * sizeof *entries);
        any |= entries[0] != STAGED;
    }
    self->is_published = any;
    const size_t nbytes = (self->table_words - 1) * sizeof *table;
    if (any == (table[0] != 0) && !memcmp(table + 1, self->entries, nbytes))
        return;
    memcpy(table + 1, self->entries, nbytes);
    table[0] = any;
}

int exchange_send(Exchange *self)
{
    if (self->is_located) {
        if (look_at_windows(self))
            return -1;
        for (int at = 0; at < self->nfields; at++)
            if (self->fields[at].is_located && locate(self, at))
                return -1;
    }
    self->epoch++;
    if (wait_until(self, is_two_behind, "wait_for_receivers")) {
        self->epoch--;
        return -1;
    }
    release_gil_if_large(self);
    const int parity = self->epoch & 1;
    for (int at = 0; at < self->nout; at++) {
        const Part *part = self->out + at;
        const Place *place = self->found[part->field];
        char *base = self->bases[part->field];
        const uint64_t where = place ? place->entry[0] : STAGED;
        if (part->is_direct && where != STAGED && where != IN_PROCESS)
            continue; /* read in the window */
        if (part->buffers[parity])
            move_cells(&part->staged, part->buffers[parity], base);
        else if (place && place->shadow)
            move_cells(&part->direct, place->shadow, base);
    }
    if (self->is_located)
        publish(self);
    store_release(self->ready, self->epoch);
    return 0;
}

/* --- receiving */

/* Where a segment of a window is mapped here; NULL with an error if the window is closed. */
static char *segment_address(Exchange *self, const Sender *sender, uint64_t window, uint64_t segment)
{
    Mapped *mapped = self->mapped + place_of(window * 8191 + segment);
    if (!mapped->address || mapped->window != window || mapped->segment != segment) {
        PyObject *answer = ask(self, "segment_of", "(iKK)", sender->rank,
                               (unsigned long long)window, (unsigned long long)segment);
        if (answer == NULL)
            return NULL;
        char *address = PyLong_AsVoidPtr(answer);
        Py_DECREF(answer);
        if (address == NULL)
            return NULL;
        *mapped = (Mapped){window, segment, address};
    }
    return mapped->address;
}

static int read_process(Exchange *self, const Sender *sender, const Part *part, uint64_t address)
{
    for (int at = 0; at < part->nreads; at++) {
        const Read *read = part->reads + at;
        char *to = read->scratch ? read->scratch : self->bases[part->field] + read->to;
        size_t done = 0;
        release_gil(self);
        while (done < read->nbytes) { /* one call reads at most 2 GiB */
            const struct iovec local = {to + done, read->nbytes - done};
            const struct iovec remote = {(void *)(uintptr_t)(address + read->offset + done),
                                         read->nbytes - done};
            const ssize_t count = process_vm_readv(sender->pid, &local, 1, &remote, 1, 0);
            if (count <= 0) {
                const int why = count < 0 ? errno : EFAULT;
                if (!tell(self, "refuse_read", sender->rank, why))
                    PyErr_SetString(PyExc_RuntimeError, "a read that failed was not refused");
                return -1;
            }
            done += (size_t)count;
        }
        if (read->scratch)
            move_cells(&read->copy, self->bases[part->field], read->scratch);
    }
    return 0;
}

static int receive_part(Exchange *self, const Sender *sender, const Part *part, const uint64_t *table)
{
    const int parity = self->epoch & 1;
    char *base = self->bases[part->field];
    if (sender->is_own) {
        move_cells(&part->direct, base, self->bases[part->far]);
        return 0;
    }
    const uint64_t *entry = table + 1 + ENTRY_WORDS * part->far;
    const uint64_t where = table[0] ? entry[0] : STAGED;
    if (!part->is_direct ||
        ((where == STAGED || where == IN_PROCESS) && part->buffers[parity])) {
        move_cells(&part->staged, base, part->buffers[parity]);
        return 0;
    }
    if (where == IN_PROCESS)
        return read_process(self, sender, part, entry[2]);
    char *address = segment_address(self, sender, where, entry[1]);
    if (address == NULL)
        return -1;
    release_gil_if_large(self);
    move_cells(&part->direct, base, address + entry[2]);
    return 0;
}

static int receive_from(Exchange *self, Sender *sender)
{
    /* The tables of all ranks are at the same places behind their control words. */
    const uint64_t *table = (const uint64_t *)sender->control +
                            (self->tables[self->epoch & 1] - (uint64_t *)self->ready);
    for (int at = 0; at < sender->nparts; at++)
        if (receive_part(self, sender, sender->parts + at, table))
            return -1;
    if (table[0] && !sender->is_own) {
        /* What a rank has overwritten since it left raises. The fence keeps the look behind the
         * copies: an acquire load orders only what follows it. */
        atomic_thread_fence(memory_order_acquire);
        if (load_acquire(sender->state) && tell(self, "require_here", sender->rank, 0))
            return -1;
    }
    sender->is_done = true;
    return 0;
}

int exchange_receive(Exchange *self)
{
    if (self->reads_windows && look_at_windows(self))
        return -1;
    int left = self->nsenders;
    for (int at = 0; at < left; at++)
        self->senders[at].is_done = false;
    while (left) { /* whoever comes first is first, but in the reverse */
        if (wait_until(self, any_ready, "wait_for_senders"))
            return -1;
        for (int at = 0; at < self->nsenders; at++) {
            Sender *sender = self->senders + at;
            if (sender->is_done)
                continue;
            if (load_acquire(sender->control) < self->epoch) {
                if (self->is_reverse)
                    break;
                continue;
            }
            release_gil_if_large(self);
            if (receive_from(self, sender))
                return -1;
            left--;
        }
    }
    store_release(self->consumed, self->epoch);
    if (self->is_located && self->is_published)
        return wait_until(self, is_read, "wait_for_readers");
    return 0;
}
