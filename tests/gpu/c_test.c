// SPDX-License-Identifier: Apache-2.0
// The header for C with GPU memory and streams, on integers, whose sums are exact. The ranks are those of the launcher.
#define _POSIX_C_SOURCE 200809L
#include <cuda_runtime_api.h>
#include <math.h>
#include <time.h>

#include "tests/c/c_test.h"

enum { kCount = 1000 };
#define CUDA(call) CHECK((call) == cudaSuccess)

// What a rank works with.
typedef struct Rank {
  ddp_context* context;
  ddp_group* group;
  ddp_device gpu;
  cudaStream_t stream;
  int rank, size;
  float total;  // of rank + 1 over the ranks
} Rank;

static ddp_buffer on_gpu(const Rank* me, void* data, size_t count) {
  const ddp_buffer b = {data, count, DDP_FLOAT32, me->gpu};
  return b;
}

static ddp_buffer new_array(const Rank* me) {
  void* data = NULL;
  CUDA(cudaMalloc(&data, kCount * sizeof(float)));
  return on_gpu(me, data, kCount);
}

// Every element, in the order of a stream, behind what holds it up for 20 ms.
static void be_slow(void* unused) {
  (void)unused;
  const struct timespec ms20 = {0, 20000000};
  nanosleep(&ms20, NULL);
}
static void fill(ddp_buffer b, float value, cudaStream_t stream) {
  float host[kCount];
  CUDA(cudaLaunchHostFunc(stream, be_slow, NULL));
  for (size_t i = 0; i < b.count; ++i) host[i] = value;
  CUDA(cudaMemcpyAsync(b.data, host, b.count * sizeof(float), cudaMemcpyHostToDevice, stream));
}
static void expect(ddp_buffer b, float value, cudaStream_t stream) {
  float host[kCount];
  CUDA(cudaMemcpyAsync(host, b.data, b.count * sizeof(float), cudaMemcpyDeviceToHost, stream));
  CUDA(cudaStreamSynchronize(stream));
  for (size_t i = 0; i < b.count; ++i) CHECK(host[i] == value);
}

static void test_streams(const Rank* me) {
  const ddp_buffer a = new_array(me);
  const float mine = (float)(me->rank + 1);
  fill(a, mine, me->stream);
  OK(ddp_all_reduce(me->group, &a, 1, &a, 1, NULL, me->stream, NULL));
  expect(a, me->total, me->stream);

  ddp_work* work = NULL;
  cudaStream_t other;
  CUDA(cudaStreamCreateWithFlags(&other, cudaStreamNonBlocking));
  fill(a, mine, me->stream);
  OK(ddp_all_reduce(me->group, &a, 1, &a, 1, NULL, me->stream, &work));
  OK(ddp_work_block_stream(work, me->gpu, other));
  expect(a, me->total, other);
  OK(ddp_work_wait(work, 30));
  CHECK(ddp_work_done(work));
  ddp_work_destroy(work);

  // CUDA's default stream, and none.
  fill(a, mine, NULL);
  OK(ddp_all_reduce(me->group, &a, 1, &a, 1, NULL, NULL, NULL));
  expect(a, me->total, NULL);
  fill(a, mine, other);
  CUDA(cudaStreamSynchronize(other));
  OK(ddp_all_reduce(me->group, &a, 1, &a, 1, NULL, DDP_NO_STREAM, &work));
  OK(ddp_work_wait(work, 30));
  ddp_work_destroy(work);
  expect(a, me->total, other);
  CUDA(cudaStreamDestroy(other));

  float host = mine;
  const ddp_buffer on_host = floats(&host, 1);
  OK(ddp_all_reduce(me->group, &on_host, 1, &on_host, 1, NULL, DDP_NO_STREAM, NULL));
  CHECK(host == me->total);
  CUDA(cudaFree(a.data));
}

// Memory of the group's, and of the program's own, which a later group gets as well.
static void test_memory(const Rank* me) {
  ddp_memory* memory = NULL;
  OK(ddp_group_allocate(me->group, kCount * sizeof(float), me->gpu, &memory));
  const ddp_buffer a = on_gpu(me, ddp_memory_data(memory), kCount);
  expect(a, 0, me->stream);
  fill(a, (float)(me->rank + 1), me->stream);
  OK(ddp_all_reduce(me->group, &a, 1, &a, 1, NULL, me->stream, NULL));
  expect(a, me->total, me->stream);
  ddp_memory_destroy(memory);

  const ddp_buffer own = new_array(me);
  OK(ddp_group_register_own(me->group, own.data, kCount * sizeof(float), me->gpu, &memory));
  fill(own, (float)(me->rank + 1), me->stream);
  OK(ddp_all_reduce(me->group, &own, 1, &own, 1, NULL, me->stream, NULL));
  expect(own, me->total, me->stream);
  ddp_group* part = NULL;
  OK(ddp_group_split(me->group, 0, 0, &part));
  OK(ddp_group_register(part, memory));
  OK(ddp_all_reduce(part, &own, 1, &own, 1, NULL, me->stream, NULL));
  expect(own, me->total * (float)me->size, me->stream);
  ddp_group_destroy(part);
  ddp_memory_destroy(memory);
  CUDA(cudaFree(own.data));
}

static void backward(const Rank* me, ddp_model* m, const ddp_buffer* from) {
  for (size_t p = 2; p-- > 0;) {
    CUDA(cudaMemcpyAsync(ddp_model_grad(m, p).data, from->data, kCount * sizeof(float), cudaMemcpyDeviceToDevice,
                         me->stream));
    ddp_model_grad_ready(m, p, me->stream);
  }
  OK(ddp_model_finish_backward(m, me->stream));
}

static double read_double(const double* where, cudaStream_t stream) {
  double value = 0;
  CUDA(cudaMemcpyAsync(&value, where, sizeof value, cudaMemcpyDefault, stream));
  CUDA(cudaStreamSynchronize(stream));
  return value;
}

static void replay(const Rank* me, ddp_model* m, const ddp_buffer* from) {
  cudaGraph_t graph;
  cudaGraphExec_t exec;
  CUDA(cudaStreamBeginCapture(me->stream, cudaStreamCaptureModeThreadLocal));
  backward(me, m, from);
  CUDA(cudaStreamEndCapture(me->stream, &graph));
  CUDA(cudaGraphInstantiate(&exec, graph, 0));
  for (int replays = 1; replays <= 3; ++replays) {
    fill(*from, (float)(2 * me->rank * replays), me->stream);
    CUDA(cudaGraphLaunch(exec, me->stream));
    for (size_t p = 0; p < 2; ++p) expect(ddp_model_grad(m, p), (float)((me->size - 1) * replays), me->stream);
  }
  CUDA(cudaGraphExecDestroy(exec));
  CUDA(cudaGraphDestroy(graph));
}

// Of a model with one gradient of the library's and one of the program's own, registered.
static void test_model(const Rank* me) {
  const ddp_buffer values[2] = {new_array(me), new_array(me)}, from = new_array(me), grad = new_array(me);
  ddp_memory* memory = NULL;
  OK(ddp_group_register_own(me->group, grad.data, kCount * sizeof(float), me->gpu, &memory));
  const ddp_parameter parameters[2] = {
      {.size = sizeof(ddp_parameter), .name = "a", .value = values[0]},
      {.size = sizeof(ddp_parameter), .name = "b", .value = values[1], .grad = grad},
  };
  for (int p = 0; p < 2; ++p) fill(values[p], (float)me->rank, me->stream);
  CUDA(cudaStreamSynchronize(me->stream));
  const ddp_model_options options = {.size = sizeof options, .check_replicas = 1, .time_replays = 1};
  ddp_model* m = NULL;
  OK(ddp_model_create(me->group, parameters, 2, &options, &m));
  ddp_memory_destroy(memory);
  for (int p = 0; p < 2; ++p) expect(values[p], 0, me->stream);  // rank 0's

  const double root = sqrt(2.0 * kCount);
  for (int step = 1; step <= 3; ++step) {
    const float mean = (float)((me->size - 1) * step);
    fill(from, (float)(2 * me->rank * step), me->stream);
    OK(ddp_model_begin_forward(m, me->stream));
    ddp_model_zero_grad(m, me->stream);
    backward(me, m, &from);
    for (size_t p = 0; p < 2; ++p) expect(ddp_model_grad(m, p), mean, me->stream);
    double norm = 0;
    const double* where = NULL;
    OK(ddp_model_clip_grad_norm(m, 1e9, 2, me->stream, &norm));
    OK(ddp_model_clip_grad_norm_async(m, 1e9, 2, me->stream, &where));
    CHECK(fabs(norm - root * mean) <= 1e-6 * norm && read_double(where, me->stream) == norm);
  }
  CHECK(ddp_model_skip_step(m) != NULL || me->size == 1);
  // On several nodes the hierarchical backend needs the host.
  const int replays = ddp_model_can_capture(m) == DDP_OK;
  CHECK(replays || strstr(ddp_error(), "the host takes part") != NULL);
  if (replays) replay(me, m, &from);
  ddp_statistics statistics = {.size = sizeof statistics};
  OK(ddp_model_statistics(m, &statistics, NULL, 0));
  CHECK(statistics.steps == (replays ? 6 : 3));
  fill(values[1], (float)(me->rank + 5), me->stream);
  OK(ddp_model_broadcast_values(m, me->size - 1, me->stream));
  expect(values[1], (float)(me->size + 4), me->stream);
  ddp_model_destroy(m);
  for (int p = 0; p < 2; ++p) CUDA(cudaFree(values[p].data));
  CUDA(cudaFree(from.data));
  CUDA(cudaFree(grad.data));
}

static ddp_status count_steps(void* user, const ddp_step_options* options) {
  ++*(int*)user;
  return options->inv_scale == NULL ? DDP_OK : ddp_fail(DDP_INTERNAL, "not fused");
}

// Once on a stream, once behind work that the host has waited for.
static void test_scaler_on(const Rank* me, void* stream) {
  const ddp_scaler_options options = {.size = sizeof options, .initial_scale = 8, .device = me->gpu};
  const ddp_buffer grad = new_array(me);
  ddp_scaler* scaler = NULL;
  OK(ddp_scaler_create(&options, &scaler));
  int steps = 0;
  const ddp_optimizer_options o = {
      .size = sizeof o, .grads = &grad, .grad_ranges = 1, .step = count_steps, .user = &steps};
  const ddp_step_options at = {.size = sizeof at, .device = me->gpu, .stream = stream};
  ddp_optimizer* optimizer = NULL;
  OK(ddp_optimizer_create(&o, &optimizer));
  for (int bad = 0; bad < 2; ++bad) {
    fill(grad, bad ? INFINITY : 3, me->stream);
    if (stream == DDP_NO_STREAM) CUDA(cudaStreamSynchronize(me->stream));
    OK(ddp_scaler_scale(scaler, &grad, 1, stream));
    OK(ddp_scaler_unscale(scaler, optimizer, stream));
    OK(ddp_scaler_step(scaler, optimizer, &at));
    int32_t found = -1;
    OK(ddp_scaler_found_inf(scaler, optimizer, &found));
    CHECK(found == bad && steps == 1);
    OK(ddp_scaler_update(scaler, stream));
    float scale = 0;
    OK(ddp_scaler_get_scale(scaler, &scale));
    CHECK(scale == (bad ? 4 : 8));
    if (!bad) expect(grad, 3, me->stream);
  }
  ddp_optimizer_destroy(optimizer);
  ddp_scaler_destroy(scaler);

  fill(grad, 3, me->stream);
  if (stream == DDP_NO_STREAM) CUDA(cudaStreamSynchronize(me->stream));
  ddp_memory* weight = NULL;
  OK(ddp_autocast_cast_weight(&grad, DDP_BFLOAT16, stream, &weight));
  uint16_t bits[kCount];
  CUDA(cudaMemcpyAsync(bits, ddp_memory_data(weight), sizeof bits, cudaMemcpyDeviceToHost, me->stream));
  CUDA(cudaStreamSynchronize(me->stream));
  for (int i = 0; i < kCount; ++i) CHECK(bits[i] == 0x4040);  // 3 in bfloat16
  ddp_memory_destroy(weight);
  CUDA(cudaFree(grad.data));
}

int main(void) {
  const char* const needed = getenv("DDP_TEST_GPUS");
  int gpus = 0;
  if (cudaGetDeviceCount(&gpus) != cudaSuccess) gpus = 0;
  if (gpus < (needed == NULL ? 1 : atoi(needed))) {
    printf("SKIPPED: needs %s GPU(s), this machine has %d\n", needed == NULL ? "1" : needed, gpus);
    return 0;
  }
  Rank me = {0};
  const ddp_context_options options = {
      .size = sizeof options, .device = {DDP_CUDA, -1}, .backend = getenv("DDP_TEST_BACKEND")};
  OK(ddp_context_create(&options, &me.context));
  me.group = ddp_context_world(me.context);
  me.gpu = ddp_context_device(me.context);
  me.rank = ddp_context_rank(me.context);
  me.size = ddp_context_world_size(me.context);
  me.total = (float)(me.size * (me.size + 1) / 2);
  CHECK(me.gpu.kind == DDP_CUDA && me.gpu.index >= 0);
  CUDA(cudaSetDevice(me.gpu.index));
  CUDA(cudaStreamCreateWithFlags(&me.stream, cudaStreamNonBlocking));
  test_streams(&me);
  test_memory(&me);
  test_model(&me);
  test_scaler_on(&me, me.stream);
  test_scaler_on(&me, DDP_NO_STREAM);
  OK(ddp_barrier(me.group, NULL));
  CUDA(cudaStreamDestroy(me.stream));
  ddp_context_destroy(me.context);
  return 0;
}
