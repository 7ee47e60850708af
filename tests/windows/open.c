/* Opens an export: prints the sum of its doubles, and adds 1 to each if there is a second argument.
   With "borrow" the first is an address, and it prints whether that has lent a descriptor. */
#include <mpishare_open.h>

static const char *lent(int fd) {
  if (fd < 0) return "-";
  return fcntl(fd + 1, F_GETFD) < 0 ? "lent" : "lent, and another one is left open";
}

int main(int argc, char **argv) {
  mpishare_export line;
  mpishare_memory memory;
  static double values[1 << 16];
  double sum = 0;
  int failed;
  size_t i, n;
  if (argc > 2 && !strcmp(argv[2], "borrow"))
    return puts(lent(mpishare_borrow(argv[1]))), 0;
  if (argc < 2 || mpishare_parse(argv[1], &line)) return puts("no export"), 2;
  failed = mpishare_open(&line, argc > 2, &memory);
  if (failed) return printf("%d: %s\n", failed, memory.why), 1;
  n = (size_t)(memory.nbytes / sizeof *values);
  if (n > sizeof values / sizeof *values) return 3;
#ifdef CUDA_VERSION
  if (cuMemcpyDtoH(values, (CUdeviceptr)(uintptr_t)memory.data, 8 * n)) return 4;
#else
  memcpy(values, memory.data, 8 * n);
#endif
  for (i = 0; i < n; i++) sum += values[i]++;
  if (argc > 2) {
#ifdef CUDA_VERSION
    if (cuMemcpyHtoD((CUdeviceptr)(uintptr_t)memory.data, values, 8 * n)) return 5;
#else
    memcpy(memory.data, values, 8 * n);
#endif
  }
  mpishare_close(&memory);
  printf("%.17g\n", sum);
  return 0;
}
