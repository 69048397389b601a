// SPDX-License-Identifier: Apache-2.0
// The calls of ddp/c/amp.h.
#include <math.h>
#include <string.h>

#include "c_test.h"

typedef struct Sgd {
  float value, grad;
  int steps;
  ddp_status fails;
} Sgd;

static ddp_status sgd_step(void* user, const ddp_step_options* options) {
  Sgd* sgd = user;
  CHECK(options->inv_scale == NULL);
  if (sgd->fails) return ddp_fail(sgd->fails, "no step today");
  sgd->value -= sgd->grad;
  ++sgd->steps;
  return DDP_OK;
}

// Of a model: gradients in the library's memory or, with `copies`, those of set_grad (0), in the program's own memory
// (1), and one that is not trained (2).
static void test_scaler_of_model(ddp_group* g, ddp_scaler* scaler, int copies) {
  float values[3] = {0}, grads[3] = {0}, scale = 0;
  ddp_parameter parameters[3] = {
      {.size = sizeof(ddp_parameter), .name = "a"},
      {.size = sizeof(ddp_parameter), .name = "b", .grad = floats(&grads[1], 1)},
      {.size = sizeof(ddp_parameter), .name = "c", .grad = floats(&grads[2], 1), .frozen = 1}};
  for (int p = 0; p < 3; ++p) parameters[p].value = floats(&values[p], 1);
  const ddp_model_options options = {.size = sizeof options, .copy_gradients = copies, .sum = 1};
  ddp_model* m = NULL;
  OK(ddp_model_create(g, parameters, 3, &options, &m));
  Sgd sgd = {0, 0, 0, 0};
  const ddp_optimizer_options o = {.size = sizeof o, .model = m, .step = sgd_step, .user = &sgd};
  ddp_optimizer* optimizer = NULL;
  OK(ddp_optimizer_create(&o, &optimizer));
  for (int bad = 0; bad < 2; ++bad) {
    OK(ddp_scaler_get_scale(scaler, &scale));
    OK(ddp_scaler_scale(scaler, &parameters[2].grad, 1, NULL));  // stands for the loss
    if (copies) OK(ddp_model_set_grad(m, 0, floats(&grads[0], 1)));
    float* const first = ddp_model_grad(m, 0).data;
    *first = scale;
    grads[1] = bad ? INFINITY : 2 * scale;
    grads[2] = 7;
    for (size_t p = 2; p-- > 0;) ddp_model_grad_ready(m, p, NULL);
    OK(ddp_model_finish_backward(m, NULL));
    OK(ddp_scaler_unscale(scaler, optimizer, NULL));
    const float n = (float)ddp_group_size(g);
    CHECK(*first == n && grads[1] == (bad ? INFINITY : 2 * n) && grads[2] == 7);
    OK(ddp_scaler_step(scaler, optimizer, NULL));
    int32_t found = -1;
    OK(ddp_scaler_found_inf(scaler, optimizer, &found));
    CHECK(found == bad && sgd.steps == 1);
    OK(ddp_scaler_update(scaler, NULL));
  }
  ddp_optimizer_destroy(optimizer);
  ddp_model_destroy(m);
}

void test_scaler(ddp_group* g) {
  const ddp_scaler_options options = {.size = sizeof options, .initial_scale = 8};
  ddp_scaler* scaler = NULL;
  OK(ddp_scaler_create(&options, &scaler));
  Sgd sgd = {10, 1, 0, 0};
  const ddp_buffer grad = floats(&sgd.grad, 1);
  const ddp_optimizer_options o = {.size = sizeof o, .grads = &grad, .grad_ranges = 1, .step = sgd_step, .user = &sgd};
  ddp_optimizer* optimizer = NULL;
  FAILS(ddp_optimizer_create(NULL, &optimizer), DDP_INVALID_ARGUMENT, "options is null");
  OK(ddp_optimizer_create(&o, &optimizer));
  OK(ddp_scaler_scale(scaler, &grad, 1, NULL));
  CHECK(sgd.grad == 8 && *ddp_scaler_scale_data(scaler) == 8);
  OK(ddp_scaler_unscale(scaler, optimizer, NULL));
  OK(ddp_scaler_step(scaler, optimizer, NULL));
  CHECK(sgd.value == 9 && sgd.steps == 1);
  OK(ddp_scaler_update(scaler, NULL));
  sgd.grad = INFINITY;
  OK(ddp_scaler_step(scaler, optimizer, NULL));
  int32_t found = 0;
  OK(ddp_scaler_found_inf(scaler, optimizer, &found));
  CHECK(found == 1 && sgd.steps == 1);
  FAILS(ddp_scaler_step(scaler, optimizer, NULL), DDP_FAILED_PRECONDITION, "Step");
  OK(ddp_scaler_update(scaler, NULL));
  float scale = 0;
  OK(ddp_scaler_get_scale(scaler, &scale));
  CHECK(scale == 4);
  sgd.grad = 1;
  sgd.fails = DDP_ABORTED;
  FAILS(ddp_scaler_step(scaler, optimizer, NULL), DDP_ABORTED, "no step today");
  OK(ddp_scaler_update(scaler, NULL));
  sgd.fails = 99;
  FAILS(ddp_scaler_step(scaler, optimizer, NULL), DDP_UNKNOWN, "no step today");
  OK(ddp_scaler_update(scaler, NULL));
  ddp_scaler_state state = {.size = sizeof state};
  OK(ddp_scaler_get_state(scaler, &state));
  CHECK(state.scale == 4 && state.enabled == 1);
  state.scale = 16;
  OK(ddp_scaler_load(scaler, &state));
  OK(ddp_scaler_broadcast(scaler, g, 0));
  OK(ddp_scaler_set_scale(scaler, 32, NULL));
  uint32_t* word = NULL;
  OK(ddp_scaler_add_found_inf(scaler, &word));
  CHECK(*word == 0);
  ddp_optimizer_destroy(optimizer);
  test_scaler_of_model(g, scaler, 0);
  test_scaler_of_model(g, scaler, 1);
  ddp_scaler_destroy(scaler);

  ddp_autocast* scope = NULL;
  const ddp_dtype inputs[2] = {DDP_FLOAT32, DDP_FLOAT32};
  ddp_dtype dtype = -1;
  OK(ddp_autocast_begin(DDP_CPU, DDP_BFLOAT16, &scope));
  OK(ddp_autocast_type_for(1, DDP_CPU, inputs, 2, &dtype));  // kLinear
  CHECK(dtype == DDP_BFLOAT16);
  ddp_memory* weight = NULL;
  const ddp_buffer w = floats(&scale, 1);
  OK(ddp_autocast_cast_weight(&w, dtype, NULL, &weight));
  CHECK(ddp_memory_bytes(weight) >= 2);
  ddp_memory_destroy(weight);
  ddp_autocast_end(scope);
  FAILS(ddp_autocast_type_for(99, DDP_CPU, inputs, 2, &dtype), DDP_INVALID_ARGUMENT, "99");
}
