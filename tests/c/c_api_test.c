// SPDX-License-Identifier: Apache-2.0
// Every kind of call of ddp/ddp_c.h, on integers, whose sums are exact. The ranks are DDP_TEST_RANKS threads of this
// process, or what the launcher says.
#define _POSIX_C_SOURCE 200809L
#include <math.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "c_test.h"
#include "ddp/ddp_c.h"

static void test_errors(ddp_group* g) {
  float x = 1;
  ddp_buffer b = floats(&x, 1);
  FAILS(ddp_all_reduce(NULL, &b, 1, &b, 1, NULL, NULL, NULL), DDP_INVALID_ARGUMENT, "group is null");
  FAILS(ddp_all_reduce(g, NULL, 1, &b, 1, NULL, NULL, NULL), DDP_INVALID_ARGUMENT, "in is null");
  b.dtype = 99;
  FAILS(ddp_all_reduce(g, &b, 1, &b, 1, NULL, NULL, NULL), DDP_INVALID_ARGUMENT, "dtype is 99");
  b = floats(&x, 1);
  b.device.kind = 7;
  FAILS(ddp_all_reduce(g, &b, 1, &b, 1, NULL, NULL, NULL), DDP_INVALID_ARGUMENT, "device is {7, 0}");
  b = floats(&x, 1);
  ddp_reduce_options reduce = {0};
  FAILS(ddp_all_reduce(g, &b, 1, &b, 1, &reduce, NULL, NULL), DDP_INVALID_ARGUMENT, "size is 0");
  reduce.size = sizeof reduce;
  reduce.op = -1;
  FAILS(ddp_all_reduce(g, &b, 1, &b, 1, &reduce, NULL, NULL), DDP_INVALID_ARGUMENT, "op is -1");
  FAILS(ddp_broadcast(g, &b, 1, 99, NULL, NULL), DDP_INVALID_ARGUMENT, "99");
  ddp_work* work = (ddp_work*)&x;
  CHECK(ddp_broadcast(g, &b, 1, 99, NULL, &work) == DDP_INVALID_ARGUMENT && work == NULL);
  CHECK(ddp_failed_ranks(NULL, 0) == 0);
  CHECK(strcmp(ddp_status_name(DDP_UNAVAILABLE), "Unavailable") == 0);
  CHECK(ddp_version() == DDP_VERSION);
  FAILS(ddp_fail(DDP_DATA_LOSS, "the file is gone"), DDP_DATA_LOSS, "the file is gone");
  FAILS(ddp_fail(99, "a code of the program's own"), 99, "a code of the program's own");

  // A program of a later version, whose struct is larger: zeros there are fine, anything else is not.
  struct {
    ddp_reduce_options known;
    int64_t unknown;
  } later = {{sizeof later, DDP_SUM, 0, 0, NULL}, 0};
  OK(ddp_all_reduce(g, &b, 1, &b, 1, &later.known, NULL, NULL));
  later.unknown = 1;
  FAILS(ddp_all_reduce(g, &b, 1, &b, 1, &later.known, NULL, NULL), DDP_INVALID_ARGUMENT, "does not know");
  // One of an earlier version, whose struct ends sooner.
  reduce.size = offsetof(ddp_reduce_options, prescale);
  reduce.op = DDP_MAX;
  x = (float)ddp_group_rank(g);
  OK(ddp_all_reduce(g, &b, 1, &b, 1, &reduce, NULL, NULL));
  CHECK(x == (float)(ddp_group_size(g) - 1));
}

static void test_store(void) {
  ddp_store* store = NULL;
  OK(ddp_store_create_memory(&store));
  OK(ddp_store_set(store, "key", "abc", 3, 1));
  void* value = NULL;
  size_t bytes = 0;
  OK(ddp_store_get(store, "key", 1, &value, &bytes));
  CHECK(bytes == 3 && memcmp(value, "abc", 3) == 0);
  ddp_free(value);
  int64_t sum = 0;
  OK(ddp_store_add(store, "n", 2, 1, &sum));
  OK(ddp_store_add(store, "n", 3, 1, &sum));
  CHECK(sum == 5);
  OK(ddp_store_set(store, "nothing", NULL, 0, 1));
  OK(ddp_store_get(store, "nothing", 1, &value, &bytes));
  CHECK(bytes == 0);
  ddp_free(value);
  FAILS(ddp_store_set(store, "nothing", NULL, 1, 1), DDP_INVALID_ARGUMENT, "value is null");
  FAILS(ddp_store_get(store, "missing", 0.01, &value, &bytes), DDP_DEADLINE_EXCEEDED, "missing");
  CHECK(value == NULL);
  ddp_store_destroy(store);
  const ddp_file_store_options file = {sizeof file, "/no/such/folder/store", "run", 1};
  FAILS(ddp_store_create_file(&file, &store), DDP_INVALID_ARGUMENT, "/no/such/folder/store");
  ddp_tcp_store_options tcp = {0};
  tcp.size = sizeof tcp;
  FAILS(ddp_store_create_tcp(&tcp, &store), DDP_INVALID_ARGUMENT, "port");
}

static void test_collectives(ddp_group* g) {
  const int n = ddp_group_size(g), r = ddp_group_rank(g);
  const float total = (float)(n * (n + 1) / 2);  // of r + 1 over all ranks
  float in[3], out[12], mine[1];
  size_t counts[4] = {1, 1, 1, 1};
  CHECK(n <= 4);
  for (int i = 0; i < n; ++i) in[i < 3 ? i : 2] = 0;
  mine[0] = (float)(r + 1);
  const ddp_buffer one = floats(mine, 1), all = floats(out, (size_t)n), result = floats(in, 1);
  ddp_work* work = NULL;
  OK(ddp_all_reduce(g, &one, 1, &result, 1, NULL, NULL, &work));
  OK(ddp_work_wait(work, 0));
  CHECK(ddp_work_done(work) && in[0] == total);
  OK(ddp_work_block_stream(work, ddp_group_device(g), NULL));
  ddp_work_destroy(work);
  const ddp_reduce_options twice = {sizeof twice, DDP_SUM, 2, 1, NULL};
  OK(ddp_reduce(g, &one, 1, &result, 1, 0, &twice, NULL, NULL));
  CHECK(r != 0 || in[0] == 2 * total);
  OK(ddp_all_gather(g, &one, 1, &all, 1, NULL, NULL, NULL));
  for (int i = 0; i < n; ++i) CHECK(out[i] == (float)(i + 1));
  OK(ddp_all_gather(g, &one, 1, &all, 1, counts, NULL, NULL));
  for (int i = 0; i < n; ++i) CHECK(out[i] == (float)(i + 1));
  OK(ddp_reduce_scatter(g, &all, 1, &result, 1, NULL, NULL, NULL, NULL));
  CHECK(in[0] == (float)(n * (r + 1)));
  OK(ddp_reduce_scatter(g, &all, 1, &result, 1, counts, NULL, NULL, NULL));
  CHECK(in[0] == (float)(n * (r + 1)));
  float back[4];
  const ddp_buffer parts = floats(back, (size_t)n);
  OK(ddp_all_to_all(g, &all, 1, NULL, &parts, 1, NULL, NULL, NULL));
  for (int i = 0; i < n; ++i) CHECK(back[i] == (float)(r + 1));
  OK(ddp_all_to_all(g, &all, 1, counts, &parts, 1, counts, NULL, NULL));
  for (int i = 0; i < n; ++i) CHECK(back[i] == (float)(r + 1));
  OK(ddp_gather(g, &one, 1, &all, 1, 0, NULL, NULL));
  OK(ddp_scatter(g, &all, 1, &result, 1, 0, NULL, NULL));
  CHECK(in[0] == (float)(r + 1));
  OK(ddp_broadcast(g, &result, 1, n - 1, NULL, NULL));
  CHECK(in[0] == (float)n);
  const int next = (r + 1) % n, previous = (r + n - 1) % n;
  if (n > 1) {
    OK(ddp_send_recv(g, &one, 1, next, &result, 1, previous, 3, NULL, NULL));
    CHECK(in[0] == (float)(previous + 1));
    OK(ddp_send(g, &one, 1, next, 4, NULL, &work));
    OK(ddp_recv(g, &result, 1, previous, 4, NULL, NULL));
    OK(ddp_work_wait(work, 10));
    ddp_work_destroy(work);
  }
  OK(ddp_barrier(g, NULL));
  ddp_group_progress(g);
}

static void test_values(ddp_group* g) {
  const int n = ddp_group_size(g), r = ddp_group_rank(g);
  double d = r + 1;
  int64_t i = r + 1;
  OK(ddp_all_reduce_double(g, &d, DDP_AVG));
  CHECK(d == (n + 1) / 2.0);
  OK(ddp_all_reduce_int64(g, &i, DDP_SUM));
  CHECK(i == n * (n + 1) / 2);
  void* bytes = NULL;
  size_t count = 0, counts[4];
  OK(ddp_broadcast_bytes(g, r == 0 ? "config" : NULL, r == 0 ? 6 : 0, 0, &bytes, &count));
  CHECK(count == 6 && memcmp(bytes, "config", 6) == 0);
  ddp_free(bytes);
  OK(ddp_gather_bytes(g, "abcd", (size_t)r + 1, &bytes, counts));
  CHECK(counts[r] == (size_t)r + 1 && memcmp(bytes, "a", 1) == 0);
  ddp_free(bytes);
  float state = (float)r;
  int64_t step = 10 + r;
  const ddp_buffer s = floats(&state, 1);
  OK(ddp_sync_state(g, &s, 1, &step));
  CHECK(step == 10 && state == 0);

  ddp_group* part = NULL;
  OK(ddp_group_split(g, r == 0 ? 0 : -1, 0, &part));
  CHECK((part != NULL) == (r == 0));
  CHECK(r != 0 || ddp_group_size(part) == 1);
  ddp_group_destroy(part);
  OK(ddp_group_set_timeout(g, 50));
  CHECK(ddp_group_timeout(g) == 50);
  FAILS(ddp_group_set_timeout(g, -1), DDP_INVALID_ARGUMENT, "time-out");
  FAILS(ddp_group_set_timeout(g, NAN), DDP_INVALID_ARGUMENT, "time-out");
  CHECK(ddp_group_timeout(g) == 50);
  OK(ddp_group_set_timeout(g, INFINITY));
  CHECK(ddp_group_timeout(g) == INFINITY);
  OK(ddp_group_set_timeout(g, 50));
  OK(ddp_group_status(g));
  ddp_memory* memory = NULL;
  ddp_scope* scope = NULL;
  OK(ddp_scope_begin(g, "allocate", &scope));
  OK(ddp_group_allocate(g, 64, ddp_group_device(g), &memory));
  ddp_scope_end(scope);
  CHECK(ddp_memory_bytes(memory) == 64 && ((char*)ddp_memory_data(memory))[63] == 0);
  OK(ddp_group_register(g, memory));
  ddp_memory_destroy(memory);
  // The program's own memory has to be a GPU's; on the CPU the group allocates.
  float own[16];
  FAILS(ddp_group_register_own(g, NULL, 64, ddp_group_device(g), &memory), DDP_INVALID_ARGUMENT, "data is null");
  CHECK(ddp_group_register_own(g, own, sizeof own, ddp_group_device(g), &memory) == DDP_INVALID_ARGUMENT);
  CHECK(memory == NULL);
}

enum { kCount = 100 };

static void backward(ddp_model* m, int r, float* value) {
  for (size_t p = 2; p-- > 0;) {
    float* grad = ddp_model_grad(m, p).data;
    for (int i = 0; i < kCount; ++i) grad[i] += (float)(r + 1) * value[0];
    ddp_model_grad_ready(m, p, NULL);
  }
}

static ddp_status refuse_step(void* user) {
  ++*(int*)user;
  return DDP_OK;
}

// A mistake does not end the loop, and an error of all ranks leaves the group as it is.
static void test_join_errors(ddp_model* m, ddp_group* g, float* value) {
  const int n = ddp_group_size(g), r = ddp_group_rank(g);
  ddp_model_grad_ready(m, 1, NULL);
  FAILS(ddp_model_begin_join(m, NULL), DDP_FAILED_PRECONDITION, "a Join begun in the middle of a step");
  FAILS(ddp_model_finish_join(m), DDP_FAILED_PRECONDITION, "without ddp_model_begin_join");
  ddp_model_grad_ready(m, 0, NULL);
  OK(ddp_model_finish_backward(m, NULL));

  OK(ddp_model_begin_join(m, NULL));
  OK(ddp_model_begin_forward(m, NULL));
  ddp_model_grad_ready(m, 1, NULL);
  FAILS(ddp_model_finish_join(m), DDP_FAILED_PRECONDITION, "middle of a step");
  ddp_model_grad_ready(m, 0, NULL);
  OK(ddp_model_finish_backward(m, NULL));
  OK(ddp_model_finish_join(m));

  const ddp_join_options join = {.size = sizeof join, .throw_on_early = 1};
  OK(ddp_model_begin_join(m, &join));
  if (n > 1 && r == 0) FAILS(ddp_model_finish_join(m), DDP_OUT_OF_RANGE, "no more inputs");
  if (n > 1 && r != 0) {
    backward(m, r, value);
    FAILS(ddp_model_finish_backward(m, NULL), DDP_OUT_OF_RANGE, "no more inputs");
  }
  if (n > 1) FAILS(ddp_model_finish_join(m), DDP_FAILED_PRECONDITION, "this Join is over");
  if (n == 1) OK(ddp_model_finish_join(m));
  OK(ddp_model_leave_join(m));
  OK(ddp_model_leave_join(m));  // outside of a loop
  OK(ddp_group_status(g));
}

static void test_model(ddp_group* g, ddp_hook* hook) {
  const int n = ddp_group_size(g), r = ddp_group_rank(g);
  float values[2][kCount], stat = (float)r;
  for (int i = 0; i < 2 * kCount; ++i) values[0][i % kCount] = values[1][i % kCount] = (float)(1 + r);
  const int64_t shape[2] = {10, 10};
  ddp_parameter parameters[2] = {{.size = sizeof(ddp_parameter), .name = "a", .shape = shape, .dimensions = 2},
                                 {.size = sizeof(ddp_parameter), .name = "b"}};
  for (int p = 0; p < 2; ++p) parameters[p].value = floats(values[p], kCount);
  const ddp_model_buffer buffer = {sizeof buffer, "stat", floats(&stat, 1), 0};
  ddp_model_options options = {.size = sizeof options, .hook = hook, .buffers = &buffer, .buffer_count = 1};
  options.unused = 5;
  ddp_model* m = NULL;
  FAILS(ddp_model_create(g, parameters, 2, &options, &m), DDP_INVALID_ARGUMENT, "unused is 5");
  options.unused = DDP_UNUSED_ERROR;
  FAILS(ddp_model_create(g, parameters, 0, &options, &m), DDP_INVALID_ARGUMENT, "parameter");
  OK(ddp_model_create(g, parameters, 2, &options, &m));
  CHECK(values[1][kCount - 1] == 1 && stat == 0);  // rank 0's
  CHECK(ddp_model_size(m) == 2 && ddp_model_value(m, 1).data == values[1] && ddp_model_grad(m, 2).data == NULL);
  ddp_buffer spans[2];
  CHECK(ddp_model_grad_spans(m, spans, 2) == 1 && spans[0].count >= 2 * kCount);
  CHECK(ddp_model_grad_spans(m, NULL, 2) == 1);
  CHECK(ddp_model_skip_step(m) == NULL);
  const float sum = (float)(n * (n + 1) / 2);
  float* grad = ddp_model_grad(m, 0).data;

  OK(ddp_model_begin_forward(m, NULL));
  ddp_model_zero_grad(m, NULL);
  OK(ddp_model_begin_no_sync(m));
  backward(m, r, values[0]);
  OK(ddp_model_finish_backward(m, NULL));
  OK(ddp_model_end_no_sync(m));
  FAILS(ddp_model_end_no_sync(m), DDP_FAILED_PRECONDITION, "without ddp_model_begin_no_sync");
  CHECK(grad[0] == (float)(r + 1));
  backward(m, r, values[0]);
  OK(ddp_model_finish_backward(m, NULL));
  CHECK(fabsf(grad[0] - 2 * sum / (float)n) < 1e-6f);
  double norm = 0, before = 0;
  OK(ddp_model_grad_norm(m, INFINITY, NULL, &norm));
  CHECK(norm == grad[0]);
  OK(ddp_model_clip_grad_norm(m, 1e9, 2, NULL, &before));
  const double* where = NULL;
  OK(ddp_model_clip_grad_norm_async(m, 1e9, 2, NULL, &where));
  CHECK(*where == before);
  FAILS(ddp_model_grad_norm(m, 3, NULL, &norm), DDP_INVALID_ARGUMENT, "order");
  ddp_statistics statistics = {.size = sizeof statistics};
  ddp_bucket_times times[1];
  OK(ddp_model_statistics(m, &statistics, times, 1));
  CHECK(statistics.steps == 1 && statistics.buckets == 1 && times[0].gradients == 2);

  // Ranks with different numbers of steps.
  int shadowed = 0;
  const ddp_join_options join = {.size = sizeof join, .on_shadowed_step = refuse_step, .user = &shadowed};
  OK(ddp_model_begin_join(m, &join));
  FAILS(ddp_model_begin_join(m, &join), DDP_FAILED_PRECONDITION, "twice");
  for (int step = 0; step <= r; ++step) {
    OK(ddp_model_begin_forward(m, NULL));
    ddp_model_zero_grad(m, NULL);
    backward(m, r, values[0]);
    OK(ddp_model_finish_backward(m, NULL));
  }
  OK(ddp_model_finish_join(m));
  FAILS(ddp_model_finish_join(m), DDP_FAILED_PRECONDITION, "without ddp_model_begin_join");
  CHECK(shadowed == n - 1 - r);
  test_join_errors(m, g, values[0]);
  if (r == 0) values[0][5] = 77;
  OK(ddp_model_broadcast_values(m, 0, NULL));
  CHECK(values[0][5] == 77);
  FAILS(ddp_model_set_grad(m, 0, floats(values[0], kCount)), DDP_FAILED_PRECONDITION, "grad");
  parameters[1].frozen = 1;
  OK(ddp_model_set_parameters(m, parameters, 2));
  ddp_model_set_weight(m, 1);
  ddp_model_destroy(m);
}

// A model whose values the library owns, which goes on in another group with its memory where it is.
static void test_rebind(ddp_group* g) {
  ddp_parameter parameter = {.size = sizeof parameter, .name = "a", .value = floats(NULL, kCount)};
  ddp_model* m = NULL;
  OK(ddp_model_create(g, &parameter, 1, NULL, &m));
  ddp_buffer spans[2];
  CHECK(ddp_model_value_spans(NULL, spans, 2) == 0);
  CHECK(ddp_model_value_spans(m, spans, 2) == 1 && spans[0].count >= kCount && spans[0].dtype == DDP_FLOAT32);
  float* value = ddp_model_value(m, 0).data;
  CHECK(spans[0].data == value && ddp_model_value_spans(m, NULL, 2) == 1);
  FAILS(ddp_model_can_capture(NULL), DDP_INVALID_ARGUMENT, "model is null");
  CHECK(ddp_model_can_capture(m) == DDP_FAILED_PRECONDITION && strlen(ddp_error()) > 0);  // a CPU has no graphs

  ddp_group* other = NULL;
  OK(ddp_group_split(g, 0, 0, &other));
  FAILS(ddp_model_rebind(m, NULL), DDP_INVALID_ARGUMENT, "group is null");
  OK(ddp_model_rebind(m, other));
  CHECK(ddp_model_value(m, 0).data == value);
  const int n = ddp_group_size(other), r = ddp_group_rank(other);
  float* grad = ddp_model_grad(m, 0).data;
  for (int i = 0; i < kCount; ++i) grad[i] = (float)(2 * r);
  ddp_model_grad_ready(m, 0, NULL);
  OK(ddp_model_finish_backward(m, NULL));
  CHECK(grad[kCount - 1] == (float)(n - 1));

  // Another group that the steps need fails, and with it the model's own.
  ddp_group* statistics = NULL;
  OK(ddp_group_split(g, 0, 0, &statistics));
  FAILS(ddp_model_watch(NULL, statistics), DDP_INVALID_ARGUMENT, "model is null");
  FAILS(ddp_model_watch(m, NULL), DDP_INVALID_ARGUMENT, "group is null");
  OK(ddp_model_watch(m, statistics));
  ddp_model_grad_ready(m, 0, NULL);
  OK(ddp_model_finish_backward(m, NULL));
  OK(ddp_barrier(g, NULL));  // nobody is in that step any more
  ddp_group_abort(statistics, "no statistics");
  ddp_model_grad_ready(m, 0, NULL);
  FAILS(ddp_model_finish_backward(m, NULL), DDP_ABORTED, "no statistics");
  CHECK(ddp_group_status(other) == DDP_ABORTED);
  ddp_model_destroy(m);
  ddp_group_destroy(statistics);
  ddp_group_destroy(other);
}

static void test_hooks(ddp_group* g) {
  ddp_hook *inner = NULL, *hook = NULL;
  FAILS(ddp_hook_create_compression(42, NULL, &hook), DDP_INVALID_ARGUMENT, "dtype is 42");
  FAILS(ddp_hook_create_block_compression(9, &hook), DDP_INVALID_ARGUMENT, "format is 9");
  OK(ddp_hook_create_all_reduce(&inner));
  OK(ddp_hook_create_compression(DDP_BFLOAT16, inner, &hook));
  ddp_hook_destroy(inner);
  test_model(g, hook);
  ddp_hook_destroy(hook);
  const ddp_power_sgd_options power = {.size = sizeof power, .rank = 1, .start_step = 100};
  OK(ddp_hook_create_power_sgd(&power, &hook));
  test_model(g, hook);
  ddp_hook_destroy(hook);
  OK(ddp_hook_create_block_compression(DDP_BLOCK_INT8, &hook));
  ddp_hook_destroy(hook);
}

static void count_operations(void* user, const ddp_operation_event* event) {
  if (event->state == 1) __atomic_add_fetch((int*)user, 1, __ATOMIC_RELAXED);
}

typedef struct Rank {
  ddp_store *store, *other;  // for the Context, and for one that fails
  int rank, size;
} Rank;

static void* run_rank(void* argument) {
  const Rank* me = argument;
  int operations = 0;
  const ddp_observer observer = {.size = sizeof observer, .user = &operations, .on_operation = count_operations};
  ddp_context_options options = {.size = sizeof options, .observer = &observer, .backend = "nonsense"};
  if (me->store != NULL) {
    options.store = me->other;
    options.rank = me->rank;
    options.world_size = me->size;
  }
  ddp_context* context = NULL;
  if (me->store != NULL) FAILS(ddp_context_create(&options, &context), DDP_INVALID_ARGUMENT, "nonsense");
  options.store = me->store;
  options.backend = NULL;
  OK(ddp_context_create(&options, &context));
  ddp_group* world = ddp_context_world(context);
  CHECK(ddp_context_rank(context) == ddp_group_rank(world));
  CHECK(ddp_context_world_size(context) == ddp_group_size(world));
  CHECK(ddp_context_local_rank(context) >= 0 && ddp_context_local_world_size(context) > 0);
  CHECK(ddp_context_device(context).kind == DDP_CPU && strlen(ddp_context_launcher(context)) > 0);
  CHECK(ddp_context_backend_choice(context) != NULL && strlen(ddp_group_backend(world)) > 0);
  CHECK(ddp_group_failed_word(world) == NULL);
  test_errors(world);
  test_store();
  test_collectives(world);
  test_values(world);
  test_model(world, NULL);
  test_rebind(world);
  test_hooks(world);
  test_scaler(world);
  CHECK(ddp_group_size(world) == 1 || __atomic_load_n(&operations, __ATOMIC_RELAXED) > 0);

  // A world that fails on all ranks, and the one that follows it.
  FAILS(ddp_context_recover(context, 0), DDP_FAILED_PRECONDITION, "");
  ddp_barrier(world, NULL);  // all ranks are done with what is before; a faster one may have aborted this already
  ddp_group_abort(world, "planted");
  FAILS(ddp_barrier(world, NULL), DDP_ABORTED, "planted");
  CHECK(ddp_group_status(world) == DDP_ABORTED);
  OK(ddp_context_recover(context, 0));
  CHECK(ddp_context_world(context) != world);
  test_collectives(ddp_context_world(context));
  if (me->store != NULL) {
    ddp_group* all = NULL;
    int32_t ranks[4] = {0, 1, 2, 3};
    OK(ddp_context_new_group(context, ranks, (size_t)me->size, 30, &all));
    test_collectives(all);
    ddp_group_destroy(all);
  }
  ddp_context_destroy(context);
  return NULL;
}

int main(void) {
  const char* given = getenv("DDP_TEST_RANKS");
  Rank ranks[4] = {{0}};
  pthread_t threads[4];
  const int size = given == NULL ? 0 : atoi(given);
  if (size == 0) {
    run_rank(&ranks[0]);
    return 0;
  }
  ddp_store *store = NULL, *other = NULL;
  OK(ddp_store_create_memory(&store));
  OK(ddp_store_create_memory(&other));
  for (int r = 0; r < size; ++r) {
    const Rank rank = {store, other, r, size};
    ranks[r] = rank;
    if (pthread_create(&threads[r], NULL, run_rank, &ranks[r]) != 0) abort();
  }
  for (int r = 0; r < size; ++r) pthread_join(threads[r], NULL);
  ddp_store_destroy(store);
  ddp_store_destroy(other);
  return 0;
}
