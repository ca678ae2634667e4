/* CUDA functions whose effect a stub needs; all others return 0 (see cuda_stubs.py).

   Memory is host memory, zeroed; copies copy at once, whatever the stream; kernels and graphs do nothing. With
   CUDA_STUB_LOG set, calls are appended to that file, one a line: the name and numbers, and for a kernel its name.

   What a machine has, from the environment: STUB_DEVICES (number), STUB_DRIVER (version, as 1000 * major + 10 * minor),
   STUB_MEMORY (bytes, of all devices), STUB_ERROR (what counting devices fails with), CUDA_VISIBLE_DEVICES. */

#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

typedef unsigned long size;
typedef void *handle;

static void say(const char *format, ...) {
  char *path = getenv("CUDA_STUB_LOG");
  if (!path) return;
  FILE *file = fopen(path, "a");
  va_list arguments;
  va_start(arguments, format);
  vfprintf(file, format, arguments);
  va_end(arguments);
  fclose(file);
}

static size number(const char *name, size fallback) {
  const char *text = getenv(name);
  return text ? strtoul(text, 0, 10) : fallback;
}

static int make(handle *object) {
  *object = calloc(1, 64);
  return 0;
}

static int set(int *place, int value) {
  *place = value;
  return 0;
}

/* Memory */

static size held;
enum { HEADER = 256 }; /* of a block: its size */

int cudaMalloc(void **p, size n) {
  if (held + n > number("STUB_MEMORY", 80ul << 30)) return 2;
  size *block = calloc(n + HEADER, 1);
  *block = n;
  __sync_fetch_and_add(&held, n);
  *p = (char *)block + HEADER;
  say("cudaMalloc %lu\n", n);
  return 0;
}
int cudaMallocHost(void **p, size n) {
  *p = calloc(n + 1, 1);
  return 0;
}
int cudaHostAlloc(void **p, size n) { return cudaMallocHost(p, n); }
int cudaFree(void *p) {
  say("cudaFree\n");
  if (!p) return 0;
  size *block = (size *)((char *)p - HEADER);
  __sync_fetch_and_sub(&held, *block);
  free(block);
  return 0;
}
int cudaFreeHost(void *p) {
  free(p);
  return 0;
}
int cudaMemcpy(void *to, void *from, size n, int kind) {
  memcpy(to, from, n);
  say("cudaMemcpy %lu %d\n", n, kind);
  return 0;
}
int cudaMemcpyAsync(void *to, void *from, size n, int kind, handle stream) {
  memcpy(to, from, n);
  say("cudaMemcpyAsync %lu %d %lu\n", n, kind, stream);
  return 0;
}
int cudaMemcpy2DAsync(char *to, size to_pitch, char *from, size from_pitch, size n, size rows, int kind, handle stream) {
  for (size i = 0; i < rows; i++) memcpy(to + i * to_pitch, from + i * from_pitch, n);
  say("cudaMemcpy2DAsync %lu %d %lu\n", n * rows, kind, stream);
  return 0;
}
int cudaMemGetInfo(size *free_bytes, size *all_bytes) {
  *all_bytes = number("STUB_MEMORY", 80ul << 30);
  *free_bytes = *all_bytes - held;
  return 0;
}

/* The device: compute capability 9.0, 132 multiprocessors, cooperative launches. Offsets of cudaDeviceProp in CUDA 13. */

static __thread int current;

static int no_device(void) {
  const char *visible = getenv("CUDA_VISIBLE_DEVICES");
  if (number("STUB_DRIVER", 13000) < 13000) return 35;
  if (number("STUB_ERROR", 0)) return number("STUB_ERROR", 0);
  return number("STUB_DEVICES", 1) == 0 || (visible && !*visible) ? 100 : 0;
}

int cudaGetDeviceCount(int *n) {
  int status = no_device();
  set(n, status ? 0 : number("STUB_DEVICES", 1));
  return status;
}
int cudaGetDevice(int *n) { return set(n, current); }
int cudaSetDevice(int n) {
  if (n < 0 || n >= number("STUB_DEVICES", 1)) return 101;
  current = n;
  return 0;
}
int cudaDeviceGetAttribute(int *value, int attribute) { return set(value, attribute == 75 ? 9 : attribute != 76); }
int cudaDriverGetVersion(int *version) { return set(version, number("STUB_DRIVER", 13000)); }
int cudaRuntimeGetVersion(int *version) { return set(version, 13000); }
int cudaOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(int *n) { return set(n, 4); }
int cudaGetDeviceProperties(char *p) {
  memset(p, 0, 256);
  for (int i = 256; i < 1000; i += 4) set((int *)(p + i), 1024);
  *(size *)(p + 288) = 80ul << 30; /* totalGlobalMem */
  *(size *)(p + 296) = 49152;      /* sharedMemPerBlock */
  set((int *)(p + 304), 65536);    /* regsPerBlock */
  set((int *)(p + 308), 32);       /* warpSize */
  set((int *)(p + 336), 2147483647);
  set((int *)(p + 340), 65535);
  set((int *)(p + 344), 65535); /* maxGridSize */
  set((int *)(p + 360), 9);
  set((int *)(p + 364), 0); /* major, minor */
  set((int *)(p + 384), 132); /* multiProcessorCount */
  return 0;
}
const char *cudaGetErrorString(int error) {
  return error == 2 ? "out of memory" : error == 100 ? "no CUDA-capable device is detected" : "stub";
}
char *cudaGetErrorName(int error) { return "stub"; }

/* Streams, events, graphs */

int cudaEventCreate(handle *event) { return make(event); }
int cudaEventCreateWithFlags(handle *event) { return make(event); }
int cudaStreamCreate(handle *stream) {
  make(stream);
  say("cudaStreamCreate %lu\n", *stream);
  return 0;
}
int cudaStreamCreateWithFlags(handle *stream) {
  make(stream);
  say("cudaStreamCreateWithFlags %lu\n", *stream);
  return 0;
}
int cudaStreamDestroy(handle stream) {
  free(stream);
  say("cudaStreamDestroy\n");
  return 0;
}
int cudaStreamSynchronize(handle stream) {
  say("cudaStreamSynchronize %lu\n", stream);
  return 0;
}
int cudaDeviceSynchronize(void) {
  say("cudaDeviceSynchronize\n");
  return 0;
}
int cudaStreamIsCapturing(handle stream, int *status) { return set(status, 0); }

/* With CUDA_STUB_FAILS_CAPTURE set, what is launched while capturing is refused, as where a kernel waits for the host. */
static int is_failing;
int cudaGetLastError(void) { return is_failing ? 900 : 0; }
int cudaPeekAtLastError(void) { return cudaGetLastError(); }
int cudaStreamBeginCapture(handle stream) {
  say("cudaStreamBeginCapture %lu\n", stream);
  is_failing = getenv("CUDA_STUB_FAILS_CAPTURE") != 0;
  return 0;
}
int cudaStreamEndCapture(handle stream, handle *graph) {
  say("cudaStreamEndCapture %lu\n", stream);
  if (is_failing) return *graph = 0, is_failing = 0, 901;
  return make(graph);
}
int cudaGraphInstantiate(handle *executable) { return make(executable); }
int cudaGraphLaunch(handle executable, handle stream) {
  say("cudaGraphLaunch %lu %lu\n", executable, stream);
  return 0;
}
int cublasCreate_v2(handle *cublas) {
  say("cublasCreate\n");
  return make(cublas);
}

/* Kernels: the provider registers the name of each with the address of its host function. */

#define SLOTS (1 << 17)
static const void *functions[SLOTS];
static const char *names[SLOTS];

static unsigned slot_of(const void *function) {
  unsigned i = (unsigned)((size)function >> 4) * 2654435761u & (SLOTS - 1);
  while (functions[i] && functions[i] != function) i = (i + 1) & (SLOTS - 1);
  return i;
}

static int launch(const void *function) {
  const char *name = names[slot_of(function)];
  say("kernel %s\n", name ? name : "?");
  return 0;
}

void __cudaRegisterFunction(handle binary, const void *function, char *device_function, const char *name) {
  unsigned i = slot_of(function);
  functions[i] = function;
  names[i] = name;
}
int __cudaGetKernel(const void **kernel, const void *function) {
  *kernel = function;
  return 0;
}
int __cudaLaunchKernel(const void *kernel) { return launch(kernel); }
int cudaLaunchKernel(const void *function) { return launch(function); }
int cudaLaunchKernelExC(handle configuration, const void *function) { return launch(function); }
int cudaLaunchCooperativeKernel(const void *function) { return launch(function); }
