// SPDX-License-Identifier: Apache-2.0
// What tests in C have in common.
#ifndef TESTS_C_C_TEST_H_
#define TESTS_C_C_TEST_H_

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "ddp/ddp_c.h"

#define CHECK(condition)                                    \
  do {                                                      \
    if (!(condition)) fail(#condition, __FILE__, __LINE__); \
  } while (0)
#define OK(call) CHECK((call) == DDP_OK)
// That `call` fails with the code and with a text that contains `words`.
#define FAILS(call, code, words)               \
  do {                                         \
    CHECK((call) == (code));                   \
    CHECK(strstr(ddp_error(), words) != NULL); \
  } while (0)

static void fail(const char* what, const char* file, int line) {
  fprintf(stderr, "%s:%d: %s; ddp_error: %s\n", file, line, what, ddp_error());
  abort();
}

static ddp_buffer floats(float* data, size_t count) {
  const ddp_buffer b = {data, count, DDP_FLOAT32, {DDP_CPU, 0}};
  return b;
}

void test_scaler(ddp_group* g);  // of c_api_test

#endif  // TESTS_C_C_TEST_H_
