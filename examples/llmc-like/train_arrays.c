// SPDX-License-Identifier: Apache-2.0
// Trains a small network whose parameters and gradients are one array each, as llm.c's are. What concerns libddp is
// marked by "ddp": the rest is the program as it would be without.
//
//   train_arrays               # all samples on one rank
//   mpirun -n 2 train_arrays   # half of them on each, the same result
//
// Samples and weights are small multiples of powers of two: sums over them are exact, so that each number of ranks that
// divides the batch ends with the same bits.
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>

#include "ddp/ddp_c.h"

enum { kIn = 8, kHidden = 16, kOut = 4, kBatch = 16, kSteps = 4, kTensors = 4 };
static const size_t kSizes[kTensors] = {(size_t)kIn * kHidden, kHidden, (size_t)kHidden* kOut, kOut};
static const char* const kNames[kTensors] = {"w1", "b1", "w2", "b2"};

typedef struct Model {
  float *w1, *b1, *w2, *b2;
} Model;

static Model slices(float* array) {
  Model m = {array, array + kSizes[0], array + kSizes[0] + kSizes[1], array + kSizes[0] + kSizes[1] + kSizes[2]};
  return m;
}

// Sum of half the squared errors over the samples, each multiplied by 2^-7; gradients are added to `g`.
static void backward_second(const Model* p, const Model* g, float hidden[][kHidden], float error[][kOut], int samples) {
  for (int s = 0; s < samples; ++s) {
    for (int o = 0; o < kOut; ++o) {
      float y = p->b2[o];
      for (int h = 0; h < kHidden; ++h) y += p->w2[h * kOut + o] * hidden[s][h];
      error[s][o] = (y - error[s][o]) / 128;
      g->b2[o] += error[s][o];
      for (int h = 0; h < kHidden; ++h) g->w2[h * kOut + o] += error[s][o] * hidden[s][h];
    }
  }
}

static void backward_first(const Model* p, const Model* g, float hidden[][kHidden], float error[][kOut], float x[][kIn],
                           int samples) {
  for (int s = 0; s < samples; ++s) {
    for (int h = 0; h < kHidden; ++h) {
      float d = 0;
      for (int o = 0; o < kOut; ++o) d += p->w2[h * kOut + o] * error[s][o];
      if (hidden[s][h] <= 0) continue;  // relu
      g->b1[h] += d;
      for (int i = 0; i < kIn; ++i) g->w1[i * kHidden + h] += d * x[s][i];
    }
  }
}

static void make_sample(int step, int sample, float* x, float* target) {
  for (int i = 0; i < kIn; ++i) x[i] = (float)((step * 5 + sample * 3 + i * 7) % 5 - 2);
  for (int o = 0; o < kOut; ++o) target[o] = x[o] + x[o + kOut];
}

#define TRY(call) \
  if ((call) != DDP_OK) return fprintf(stderr, "%s\n", ddp_error()), 1

int main(void) {
  size_t total = 0;
  for (int t = 0; t < kTensors; ++t) total += kSizes[t];
  float* const values = malloc(total * sizeof *values);
  for (size_t i = 0; i < total; ++i) values[i] = (float)((int)(i * 11 % 9) - 4) / 16;
  const Model p = slices(values);

  ddp_context* context = NULL;  // ddp: from here ...
  ddp_memory* memory = NULL;
  ddp_model* model = NULL;
  ddp_parameter list[kTensors] = {{0}};
  TRY(ddp_context_create(NULL, &context));
  ddp_group* const world = ddp_context_world(context);
  const ddp_device cpu = ddp_context_device(context);
  TRY(ddp_group_allocate(world, total * sizeof(float), cpu, &memory));  // in place of calloc
  float* const grads = ddp_memory_data(memory);
  size_t offset = 0;
  for (int t = 0; t < kTensors; offset += kSizes[t++]) {
    const ddp_buffer value = {values + offset, kSizes[t], DDP_FLOAT32, cpu};
    const ddp_buffer grad = {grads + offset, kSizes[t], DDP_FLOAT32, cpu};
    const ddp_parameter parameter = {.size = sizeof parameter, .name = kNames[t], .value = value, .grad = grad};
    list[t] = parameter;
  }
  const ddp_model_options options = {.size = sizeof options, .sum = 1};  // the loss is a sum over samples
  TRY(ddp_model_create(world, list, kTensors, &options, &model));
  const int rank = ddp_context_rank(context), ranks = ddp_context_world_size(context);  // ddp: ... to here
  const Model g = slices(grads);
  const int samples = kBatch / ranks;

  float x[kBatch][kIn], hidden[kBatch][kHidden], error[kBatch][kOut];
  for (int step = 0; step < kSteps; ++step) {
    ddp_model_zero_grad(model, NULL);  // ddp
    for (int s = 0; s < samples; ++s) {
      make_sample(step, rank * samples + s, x[s], error[s]);
      for (int h = 0; h < kHidden; ++h) {
        float sum = p.b1[h];
        for (int i = 0; i < kIn; ++i) sum += p.w1[i * kHidden + h] * x[s][i];
        hidden[s][h] = sum > 0 ? sum : 0;
      }
    }
    backward_second(&p, &g, hidden, error, samples);
    ddp_model_grad_ready(model, 3, NULL);  // ddp: reduced while the first layer's gradients are computed
    ddp_model_grad_ready(model, 2, NULL);  // ddp
    backward_first(&p, &g, hidden, error, x, samples);
    ddp_model_grad_ready(model, 1, NULL);         // ddp
    ddp_model_grad_ready(model, 0, NULL);         // ddp
    TRY(ddp_model_finish_backward(model, NULL));  // ddp
    for (size_t i = 0; i < total; ++i) {          // rounded to multiples of 2^-6, so that the next sums are exact, too
      const float value = values[i] - grads[i] / 4;
      values[i] = (float)(int)(value * 64 + (value < 0 ? -0.5f : 0.5f)) / 64;
    }
  }
  uint64_t hash = 0;
  for (size_t i = 0; i < total; ++i) hash = hash * 31 + (uint64_t)(int64_t)(values[i] * 64);
  printf("rank %d of %d: weights %016llx\n", rank, ranks, (unsigned long long)hash);
  ddp_model_destroy(model);      // ddp
  ddp_memory_destroy(memory);    // ddp
  ddp_context_destroy(context);  // ddp
  free(values);
  return 0;
}
