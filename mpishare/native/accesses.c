/* The first accesses to pages of windows, seen by page protection, for MPISHARE_CHECK=1.
 *
 * Each interval begins with all pages protected. A fault is an access whose address is known to the
 * byte; it opens its page until the next interval. On x86-64 the first `STEPS` accesses open their
 * page for one instruction only, by the trap flag, and how many bytes follow the first one is read
 * from the instruction. The first intervals of a process have more steps, out of a store that does
 * not fill again, so that small windows are seen completely and a long run costs no more.
 *
 * The handler notes the line of Python: a fault is synchronous, and its instruction is a load or a
 * store of NumPy or another library, as safe a place for calls of Python as a callback. */

#define _GNU_SOURCE
#include "module.h"

#include <errno.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <ucontext.h>
#include <unistd.h>

enum {
    STEPS = 16,      /* in one interval; each costs several faults */
    MORE = 1 << 13,  /* in all intervals together, beyond those */
    SHARE = 8,       /* one interval has this part of what is left of them */
    MAX_UNITS = 256, /* of pages that one fault opens, in a segment: bounds faults and mappings */
    MAX_OPEN = 4,    /* pages that one instruction touches */
};

enum { PROTECTED, READABLE, WRITABLE };

typedef struct Region {
    struct Region *next;
    char *start;
    size_t nbytes, unit;
    unsigned char states[MAX_UNITS];
} Region;

static Region *regions;
static int steps_left, more_left = MORE, more_end;
static size_t page_size;
static PyObject *skipped;  /* the starts of files whose frames are passed over */
static PyObject *accesses; /* a list, since the interval began */
/* Never held while the GIL is waited for, nor while a page of a region is touched. */
static atomic_flag lock = ATOMIC_FLAG_INIT;
static struct sigaction previous_fault;

static void acquire(void)
{
    while (atomic_flag_test_and_set_explicit(&lock, memory_order_acquire))
        ;
}

static void release(void)
{
    atomic_flag_clear_explicit(&lock, memory_order_release);
}

static Region *region_of(const char *address)
{
    Region *region = regions;
    while (region != NULL && (size_t)(address - region->start) >= region->nbytes)
        region = region->next;
    return region;
}

static void set_all(Region *region, int state)
{
    mprotect(region->start, region->nbytes, state == PROTECTED ? PROT_NONE : PROT_READ | PROT_WRITE);
    memset(region->states, state, sizeof region->states);
}

static void open_unit(Region *region, size_t unit, int state)
{
    const size_t begin = unit * region->unit, left = region->nbytes - begin;
    region->states[unit] = (unsigned char)state;
    if (mprotect(region->start + begin, left < region->unit ? left : region->unit,
                 state == WRITABLE ? PROT_READ | PROT_WRITE : PROT_READ))
        set_all(region, WRITABLE); /* there were too many mappings: now one, that is not watched */
}

static int take_step(void)
{
    int *left = steps_left > 0 ? &steps_left : &more_left;
    if (left == &more_left && more_left <= more_end)
        return 0;
    --*left;
    return 1;
}

/* Notes an access with the innermost line of Python outside of this package and NumPy; none of a
 * thread without Python, which might wait for the GIL of a thread that waits for it. */
static void note(const char *address, size_t nbytes, int is_write)
{
    if (!Py_IsInitialized() || PyGILState_GetThisThreadState() == NULL)
        return;
    PyObject *type, *value, *trace, *file = NULL, *access = NULL;
    int line = 0, is_skipped = 1;
    const PyGILState_STATE state = PyGILState_Ensure();
    PyErr_Fetch(&type, &value, &trace);
    PyObject *frame = (PyObject *)PyThreadState_GetFrame(PyThreadState_Get());
    while (frame != NULL && frame != Py_None && is_skipped) {
        PyObject *code = (PyObject *)PyFrame_GetCode((PyFrameObject *)frame);
        Py_XDECREF(file);
        file = PyObject_GetAttrString(code, "co_filename");
        Py_DECREF(code);
        line = PyFrame_GetLineNumber((PyFrameObject *)frame);
        is_skipped = 0;
        for (Py_ssize_t at = 0; file != NULL && at < PyTuple_Size(skipped); at++)
            is_skipped |= PyUnicode_Tailmatch(file, PyTuple_GetItem(skipped, at), 0,
                                              PY_SSIZE_T_MAX, -1) == 1;
        PyObject *outer = PyObject_GetAttrString(frame, "f_back");
        Py_DECREF(frame);
        frame = outer;
    }
    Py_XDECREF(frame);
    if (file != NULL)
        access = Py_BuildValue("KnNNi", (unsigned long long)(uintptr_t)address,
                               (Py_ssize_t)nbytes, PyBool_FromLong(is_write), file, line);
    if (access == NULL || PyList_Append(accesses, access))
        PyErr_WriteUnraisable(NULL); /* of memory that is short */
    Py_XDECREF(access);
    PyErr_Restore(type, value, trace);
    PyGILState_Release(state);
}

#ifdef __x86_64__
/* Pages that are open for the next instruction of this thread. */
static __thread char *open_pages[MAX_OPEN];
static __thread int open_count;
static struct sigaction previous_trap;

enum { TRAP_FLAG = 0x100, DIRECTION_FLAG = 0x400, WRITE_ERROR = 2 };

/* How an instruction begins: what stands before its opcode, and that. */
typedef struct Opcode {
    int map, code;
    int kind;    /* 0: packed single, 1: packed double or integers, 2 and 3: by the opcode */
    int is_wide; /* its integers have 8 bytes */
    int is_repeated, is_masked;
    size_t vector; /* bytes of a whole register */
} Opcode;

static Opcode decode(const unsigned char *at)
{
    Opcode it = {.vector = 16};
    for (; *at == 0x66 || *at == 0xF2 || *at == 0xF3; at++) {
        if (*at != 0x66)
            it.kind = *at == 0xF3 ? 2 : 3;
        else if (!it.kind)
            it.kind = 1;
    }
    it.is_repeated = it.kind > 1;
    if ((*at & 0xF0) == 0x40)
        it.is_wide = (*at++ & 8) != 0;
    if (*at == 0xC5 || *at == 0xC4) { /* VEX */
        const int has_map = *at++ == 0xC4;
        it.map = has_map ? *at++ & 31 : 1;
        it.is_wide = has_map && (*at & 0x80);
        it.kind = *at & 3;
        it.vector = *at & 4 ? 32 : 16;
        at++;
    } else if (*at == 0x62) { /* EVEX */
        it.map = at[1] & 7;
        it.is_wide = (at[2] & 0x80) != 0;
        it.kind = at[2] & 3;
        it.vector = (size_t)16 << (at[3] >> 5 & 3);
        it.is_masked = (at[3] & 0x17) != 0; /* or one element for all */
        at += 4;
    } else if (*at == 0x0F) {
        it.map = 1;
        at++;
    }
    it.code = *at;
    return it;
}

/* Whether it moves or stores a string; a step is one repetition, mostly of one byte. */
static int is_string(Opcode it)
{
    return it.map == 0 && ((it.code & 0xFE) == 0xA4 || (it.code & 0xFE) == 0xAA);
}

/* Bytes that an instruction reads or writes from the address of its fault on: never more than it
 * does, and 1 where that is not known. */
static size_t nbytes_of(Opcode it, const char *address, int is_write, const greg_t *registers)
{
    if (is_string(it)) {
        if (address != (char *)registers[is_write ? REG_RDI : REG_RSI] ||
            registers[REG_EFL] & DIRECTION_FLAG)
            return 1;
        const size_t each = !(it.code % 2) ? 1 : it.is_wide ? 8 : 2; /* or 4 */
        return each * (it.is_repeated ? (size_t)registers[REG_RCX] : 1);
    }
    /* A page may begin within what the instruction accesses. */
    if ((uintptr_t)address % page_size == 0 && region_of(address - 1) != NULL)
        return 1;
    if (it.map == 0)
        return it.code != 0x89 && it.code != 0x8B ? 1 : it.is_wide ? 8 : it.kind ? 2 : 4; /* mov */
    if (it.map != 1 || it.is_masked)
        return 1;
    switch (it.code) {
    case 0x10: case 0x11: case 0x51: case 0x54: case 0x55: case 0x56: case 0x57: case 0x58:
    case 0x59: case 0x5C: case 0x5D: case 0x5E: case 0x5F: /* movups, movss, add, ... */
        return it.kind == 2 ? 4 : it.kind == 3 ? 8 : it.vector;
    case 0x28: case 0x29: case 0x2B: /* movaps, movntps */
        return it.vector;
    case 0x6F: case 0x7F: /* movdqa, movdqu */
        return it.kind == 0 ? 8 : it.vector;
    case 0xE7: case 0xD4: case 0xDB: case 0xEB: case 0xEF: case 0xF8: case 0xF9: case 0xFA:
    case 0xFB: case 0xFC: case 0xFD: case 0xFE: /* movntdq, padd, psub, pand, por, pxor */
        return it.kind == 0 ? 8 : it.vector;
    case 0xD6: /* movq */
        return 8;
    case 0x7E: /* movq and movd */
        return it.kind == 2 ? 8 : it.is_wide ? 8 : 4;
    default:
        return 1;
    }
}

static int step_over(char *page, ucontext_t *context)
{
    if (open_count == MAX_OPEN || !take_step() || mprotect(page, page_size, PROT_READ | PROT_WRITE))
        return 0;
    open_pages[open_count++] = page;
    context->uc_mcontext.gregs[REG_EFL] |= TRAP_FLAG;
    return 1;
}

static void on_trap(int number, siginfo_t *info, void *given)
{
    ucontext_t *context = given;
    (void)info;
    if (!open_count) {
        sigaction(number, &previous_trap, NULL);
        raise(number);
        return;
    }
    const int error = errno;
    acquire();
    while (open_count) {
        char *page = open_pages[--open_count];
        Region *region = region_of(page);
        if (region != NULL && !region->states[(size_t)(page - region->start) / region->unit])
            mprotect(page, page_size, PROT_NONE);
    }
    release();
    context->uc_mcontext.gregs[REG_EFL] &= ~TRAP_FLAG;
    errno = error;
}
#endif

static void on_fault(int number, siginfo_t *info, void *context)
{
    const int error = errno;
    char *address = info->si_addr;
    acquire();
    Region *region = info->si_code == SEGV_ACCERR ? region_of(address) : NULL;
    if (region == NULL) {
        release();
        sigaction(number, &previous_fault, NULL); /* the instruction faults again, for that one */
        if (info->si_code <= 0)
            raise(number); /* another process had sent it */
        return;
    }
    const size_t offset = (size_t)(address - region->start), unit = offset / region->unit;
#ifdef __x86_64__
    const greg_t *registers = ((ucontext_t *)context)->uc_mcontext.gregs;
    const int is_write = (registers[REG_ERR] & WRITE_ERROR) != 0;
    const Opcode it = decode((const unsigned char *)registers[REG_RIP]);
    const size_t nbytes = nbytes_of(it, address, is_write, registers);
    const int is_stepped = !is_string(it) && step_over(address - offset % page_size, context);
#else
    /* A page opens for reading first: where that did not suffice, the access is a write. */
    const int is_write = region->states[unit] != PROTECTED, is_stepped = 0;
    const size_t nbytes = 1;
    (void)context;
#endif
    if (!is_stepped)
        open_unit(region, unit, is_write ? WRITABLE : READABLE);
    /* What follows in another page faults there. */
    size_t opened = is_stepped ? page_size - offset % page_size
                               : region->unit - offset % region->unit;
    if (opened > region->nbytes - offset)
        opened = region->nbytes - offset;
    release();
    note(address, nbytes < opened ? nbytes : opened, is_write);
    errno = error;
}

/* Puts a handler where another one may have come since. */
static void install(int number, void (*handler)(int, siginfo_t *, void *), struct sigaction *before)
{
    struct sigaction now, ours = {.sa_flags = SA_SIGINFO | SA_NODEFER, .sa_sigaction = handler};
    if (sigaction(number, NULL, &now) || now.sa_sigaction == handler)
        return;
    *before = now;
    sigaction(number, &ours, NULL);
}

PyObject *watch_accesses(PyObject *module, PyObject *given)
{
    (void)module;
    unsigned long long address, nbytes;
    PyObject *files;
    if (!PyArg_ParseTuple(given, "KKO!", &address, &nbytes, &PyTuple_Type, &files))
        return NULL;
    Region *region = calloc(1, sizeof *region);
    if (region == NULL)
        return PyErr_NoMemory();
    page_size = (size_t)sysconf(_SC_PAGESIZE);
    region->start = (char *)(uintptr_t)address;
    region->nbytes = nbytes;
    for (region->unit = page_size; region->unit * MAX_UNITS < nbytes;)
        region->unit *= 2;
    Py_INCREF(files);
    Py_XDECREF(skipped);
    skipped = files;
    acquire();
    region->next = regions;
    regions = region;
    release();
    Py_RETURN_NONE;
}

PyObject *unwatch_accesses(PyObject *module, PyObject *given)
{
    (void)module;
    char *start = PyLong_AsVoidPtr(given);
    if (PyErr_Occurred())
        return NULL;
    Region **at = &regions, *found;
    acquire();
    while ((found = *at) != NULL && found->start != start)
        at = &found->next;
    if (found != NULL) {
        *at = found->next;
        set_all(found, WRITABLE);
    }
    release();
    free(found);
    Py_RETURN_NONE;
}

PyObject *take_accesses(PyObject *module, PyObject *is_open)
{
    (void)module;
    const int state = PyObject_IsTrue(is_open) ? WRITABLE : PROTECTED;
    PyObject *taken = accesses == NULL ? PyList_New(0) : accesses;
    accesses = PyList_New(0);
    if (taken == NULL || accesses == NULL)
        return PyErr_NoMemory();
    install(SIGSEGV, on_fault, &previous_fault);
#ifdef __x86_64__
    install(SIGTRAP, on_trap, &previous_trap);
#endif
    acquire();
    for (Region *region = regions; region != NULL; region = region->next)
        set_all(region, state);
    steps_left = STEPS;
    more_end = more_left - more_left / SHARE;
    release();
    return taken;
}
