/* Opens memory of an mpishare window in a program without Python, by the line str(window.export()).

   C99 or C++17, on Linux; include it before other headers. Host memory alone, unless cuda.h was
   included before it or MPISHARE_WITH_CUDA is defined: then link with -lcuda. The window must stay
   open until mpishare_open has returned; on a GPU until mpishare_close. Nothing orders this process
   and the job. A line that was forged, or is of a window that was closed, is an error:
   only a regular file of the exported identity and size is mapped, and no byte behind it. */
#ifndef MPISHARE_OPEN_H
#define MPISHARE_OPEN_H
#if defined(_FEATURES_H) && !defined(__USE_GNU) /* of glibc */
#error "include mpishare_open.h before other headers, or define _GNU_SOURCE"
#endif
#ifndef _GNU_SOURCE
#define _GNU_SOURCE 1
#endif
#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <stdio.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/time.h>
#include <sys/un.h>
#include <unistd.h>
#ifdef MPISHARE_WITH_CUDA
#include <cuda.h>
#endif

typedef struct {
  char kind[16]; /* cuda-ipc, cuda-fd, host-file */
  uint64_t offset, nbytes;
  char uuid[48]; /* of the GPU; "-" on the host */
  unsigned char handle[64];
  char path[100]; /* "-" where there is none */
} mpishare_export;

typedef struct {
  void *data; /* the memory: of the GPU, unless the kind is host-file */
  uint64_t nbytes;
  const char *why; /* what failed */
  void *base;      /* the rest is for mpishare_close */
  size_t mapped;
  int kind, device;
} mpishare_memory;

/* Reads a line; returns 0, or EINVAL if it is none of an export. */
static inline int mpishare_parse(const char *line, mpishare_export *e) {
  char hex[129], offset[24], nbytes[24];
  int i, end = 0;
  memset(e, 0, sizeof *e);
  if (sscanf(line, "mpishare-export 1 %15s %20[0-9] %20[0-9] %47s %128[0-9a-f] %99s%n", e->kind,
             offset, nbytes, e->uuid, hex, e->path, &end) != 6 ||
      strlen(hex) != 128 || line[end + strspn(line + end, " \r\n")])
    return EINVAL;
  for (i = 0; i < 64; i++) {
    unsigned byte;
    sscanf(hex + 2 * i, "%2x", &byte);
    e->handle[i] = (unsigned char)byte;
  }
  if (strlen(offset) > 18 || strlen(nbytes) > 18) return EINVAL; /* their sum fits in 64 bits */
  sscanf(offset, "%" SCNu64, &e->offset);
  sscanf(nbytes, "%" SCNu64, &e->nbytes);
  return e->nbytes ? 0 : EINVAL;
}

static inline int mpishare_failed(mpishare_memory *m, const char *why, int code) {
  m->why = why;
  return code ? code : EINVAL;
}

static inline int mpishare_open_file(const mpishare_export *e, int writable, mpishare_memory *m) {
  int pid, number, fd, protection = writable ? PROT_READ | PROT_WRITE : PROT_READ;
  char path[100];
  struct stat facts;
  uint64_t identity[2], page = (uint64_t)sysconf(_SC_PAGESIZE), skipped = e->offset % page;
  if (sscanf(e->path, "/proc/%9d/fd/%9d", &pid, &number) != 2) pid = number = 0;
  snprintf(path, sizeof path, "/proc/%d/fd/%d", pid, number);
  if (strcmp(path, e->path)) return mpishare_failed(m, "the path is no descriptor", EINVAL);
  if (stat(path, &facts)) return mpishare_failed(m, "the window or its process is gone", errno);
  memcpy(identity, e->handle, sizeof identity);
  if (!S_ISREG(facts.st_mode) || facts.st_dev != identity[0] || facts.st_ino != identity[1])
    return mpishare_failed(m, "the window is closed: another file is there", ESTALE);
  fd = open(path, (writable ? O_RDWR : O_RDONLY) | O_CLOEXEC | O_NONBLOCK);
  if (fd < 0) return mpishare_failed(m, "open", errno);
  if (fstat(fd, &facts) || facts.st_dev != identity[0] || facts.st_ino != identity[1] ||
      (uint64_t)facts.st_size < e->offset + e->nbytes) {
    close(fd);
    return mpishare_failed(m, "the file is another one, or too short", ESTALE);
  }
  m->mapped = (size_t)(skipped + e->nbytes);
  m->base = mmap(NULL, m->mapped, protection, MAP_SHARED, fd, (off_t)(e->offset - skipped));
  close(fd);
  if (m->base == MAP_FAILED) return mpishare_failed(m, "mmap", errno);
  m->data = (char *)m->base + skipped;
  return 0;
}

#ifndef MPISHARE_ANSWER_S
#define MPISHARE_ANSWER_S 10 /* for an owner that is stopped */
#endif

/* Borrows the descriptor of a memory pool from its owner, a process of this user; -1 without one. */
static inline int mpishare_borrow(const char *path) {
  char request[64], byte, *key;
  union {
    struct cmsghdr head;
    char room[CMSG_SPACE(sizeof(int))];
  } control;
  struct sockaddr_un to;
  struct iovec part;
  struct msghdr message;
  struct timeval wait = {MPISHARE_ANSWER_S, 0};
  struct ucred owner;
  socklen_t size = sizeof owner;
  int fd = -1, door = socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0);
  memset(&to, 0, sizeof to);
  memset(&message, 0, sizeof message);
  to.sun_family = AF_UNIX; /* an abstract address: sun_path begins with a zero */
  snprintf(to.sun_path + 1, sizeof to.sun_path - 1, "%s", path);
  key = strrchr(to.sun_path + 1, '/');
  if (key) {
    int length = (int)(key - to.sun_path), n;
    *key = 0;
    n = snprintf(request, sizeof request, "{\"key\": \"%.16s\"}", key + 1);
    part.iov_base = &byte;
    part.iov_len = 1;
    message.msg_iov = &part;
    message.msg_iovlen = 1;
    message.msg_control = control.room;
    message.msg_controllen = CMSG_LEN(sizeof fd); /* of one: all of the room takes two */
    setsockopt(door, SOL_SOCKET, SO_SNDTIMEO, &wait, sizeof wait); /* of connect, too */
    setsockopt(door, SOL_SOCKET, SO_RCVTIMEO, &wait, sizeof wait);
    /* Any user may bind an address whose owner has ended. */
    if (!connect(door, (struct sockaddr *)&to, (socklen_t)(sizeof(sa_family_t) + (size_t)length)) &&
        !getsockopt(door, SOL_SOCKET, SO_PEERCRED, &owner, &size) && owner.uid == getuid() &&
        send(door, request, (size_t)n, MSG_NOSIGNAL) == n &&
        recvmsg(door, &message, MSG_CMSG_CLOEXEC) > 0 && message.msg_controllen >= CMSG_LEN(sizeof fd) &&
        control.head.cmsg_level == SOL_SOCKET && control.head.cmsg_type == SCM_RIGHTS)
      memcpy(&fd, CMSG_DATA(&control.head), sizeof fd);
  }
  close(door);
  return fd;
}

#ifdef CUDA_VERSION
static inline int mpishare_open_cuda(const mpishare_export *e, mpishare_memory *m) {
  CUcontext context;
  CUdeviceptr base = 0, start;
  CUuuid uuid;
  size_t size;
  char text[48];
  int i, at, count = 0, has_pool = !strcmp(e->kind, "cuda-fd");
  if (cuInit(0) || cuDeviceGetCount(&count)) return mpishare_failed(m, "cuInit", ENODEV);
  for (m->device = 0; m->device < count; m->device++) {
    if (cuDeviceGetUuid(&uuid, m->device)) continue;
    at = snprintf(text, sizeof text, "GPU-");
    for (i = 0; i < 16; i++)
      at += snprintf(text + at, sizeof text - (size_t)at, "%s%02x",
                     i == 4 || i == 6 || i == 8 || i == 10 ? "-" : "", uuid.bytes[i] & 255u);
    if (!strcmp(text, e->uuid)) break;
  }
  if (m->device == count) return mpishare_failed(m, "its GPU is hidden from here", ENODEV);
  if (cuDevicePrimaryCtxRetain(&context, m->device) || cuCtxSetCurrent(context))
    return mpishare_failed(m, "cuDevicePrimaryCtxRetain", ENODEV);
  if (has_pool) {
    CUmemPoolPtrExportData data;
    CUmemAccessDesc access;
    CUmemoryPool pool;
    int fd = mpishare_borrow(e->path);
    CUresult failed;
    if (fd < 0) return mpishare_failed(m, "the window or its process is gone", ESTALE);
    failed = cuMemPoolImportFromShareableHandle(&pool, (void *)(intptr_t)fd,
                                                CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR, 0);
    close(fd);
    if (failed) return mpishare_failed(m, "cuMemPoolImportFromShareableHandle", (int)failed);
    memset(&access, 0, sizeof access);
    access.location.type = CU_MEM_LOCATION_TYPE_DEVICE;
    access.location.id = m->device;
    access.flags = CU_MEM_ACCESS_FLAGS_PROT_READWRITE;
    memcpy(&data, e->handle, sizeof data);
    failed = cuMemPoolSetAccess(pool, &access, 1);
    if (!failed) failed = cuMemPoolImportPointer(&base, pool, &data);
    cuMemPoolDestroy(pool); /* lives on with its memory */
    if (failed) return mpishare_failed(m, "cuMemPoolImportPointer", (int)failed);
  } else {
    CUipcMemHandle handle;
    CUresult failed;
    memcpy(&handle, e->handle, sizeof handle);
    failed = cuIpcOpenMemHandle(&base, handle, CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS);
    if (failed) return mpishare_failed(m, "cuIpcOpenMemHandle", (int)failed);
  }
  m->kind = 1 + has_pool;
  m->base = (void *)(uintptr_t)base;
  m->data = (char *)m->base + e->offset;
  if (cuMemGetAddressRange(&start, &size, base) || size < e->offset + e->nbytes)
    return mpishare_failed(m, "the memory is too short", ESTALE);
  return 0;
}
#endif

static inline void mpishare_close(mpishare_memory *m) {
#ifdef CUDA_VERSION
  if (m->kind == 1) cuIpcCloseMemHandle((CUdeviceptr)(uintptr_t)m->base);
  if (m->kind == 2) cuMemFree((CUdeviceptr)(uintptr_t)m->base);
  if (m->kind) cuDevicePrimaryCtxRelease(m->device);
#endif
  if (!m->kind && m->mapped && m->base != MAP_FAILED) munmap(m->base, m->mapped);
  memset(m, 0, sizeof *m);
}

/* Maps what was exported; returns 0, or a code of errno or CUDA, and the reason in m->why. */
static inline int mpishare_open(const mpishare_export *e, int writable, mpishare_memory *m) {
  int failed;
  const char *why;
  memset(m, 0, sizeof *m);
  m->nbytes = e->nbytes;
  if (!strcmp(e->kind, "host-file"))
    failed = mpishare_open_file(e, writable, m);
#ifdef CUDA_VERSION
  else if (!strcmp(e->kind, "cuda-ipc") || !strcmp(e->kind, "cuda-fd"))
    failed = mpishare_open_cuda(e, m);
#endif
  else
    failed = mpishare_failed(m, "this program was compiled without CUDA", ENOTSUP);
  if (failed) {
    why = m->why;
    mpishare_close(m);
    m->why = why;
  }
  return failed;
}
#endif
