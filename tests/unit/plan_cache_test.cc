// SPDX-License-Identifier: Apache-2.0
// What is remembered of a trial from run to run.
#include "examples/nn/plan_cache.h"

#include <sys/stat.h>

#include <fstream>
#include <optional>
#include <string>
#include <thread>
#include <vector>

#include "tests/support/catch.h"
#include "tests/support/temporary_folder.h"
#include "tests/support/variable.h"

namespace nn {
namespace {

TEST_CASE("a choice is found in the same run and in the next one") {
  const ddp::testing::TemporaryFolder folder;
  const std::string file = folder.path() + "/new/folder/plans";
  {
    PlanCache cache(file);
    CHECK(cache.Find("a GPU, 1 2") == std::nullopt);
    cache.Put("a GPU, 1 2", 3);
    cache.Put("a GPU, 1 3", 0);
    CHECK(cache.Find("a GPU, 1 2") == 3);
  }
  PlanCache cache(file);
  CHECK(cache.Find("a GPU, 1 2") == 3);
  CHECK(cache.Find("a GPU, 1 3") == 0);
  CHECK(cache.Find("a GPU, 1") == std::nullopt);
  struct stat found = {};
  REQUIRE(stat(file.c_str(), &found) == 0);
  CHECK((found.st_mode & 077) == 0);
}

TEST_CASE("the first of several choices counts, and lines that are none do not") {
  const ddp::testing::TemporaryFolder folder;
  const std::string file = folder.path() + "/plans";
  PlanCache one(file), other(file);  // two ranks
  one.Put("key", 1);
  other.Put("key", 2);
  CHECK(other.Find("key") == 2);
  std::ofstream(file, std::ios::app) << "no tab\nnegative\t-1\nlarge\t99999999999999999999999\n\t\nlast\t7";
  const PlanCache next(file);
  CHECK(next.Find("key") == 1);
  for (const char* key : {"no tab", "negative", "large", ""}) CHECK(next.Find(key) == std::nullopt);
  CHECK(next.Find("last") == 7);
}

TEST_CASE("what many write at the same time is all there") {
  const ddp::testing::TemporaryFolder folder;
  const std::string file = folder.path() + "/plans";
  std::vector<std::thread> writers;
  for (size_t w = 0; w < 4; ++w) {
    writers.emplace_back([&, w] {
      PlanCache cache(file);
      for (size_t i = 0; i < 100; ++i) cache.Put("key " + std::to_string(w) + " " + std::to_string(i), i);
    });
  }
  for (std::thread& writer : writers) writer.join();
  const PlanCache cache(file);
  for (size_t w = 0; w < 4; ++w) {
    for (size_t i = 0; i < 100; ++i) CHECK(cache.Find("key " + std::to_string(w) + " " + std::to_string(i)) == i);
  }
}

TEST_CASE("without a file nothing is remembered") {
  for (const char* const file : {"", "/dev/null/plans"}) {
    PlanCache(file).Put("key", 1);
    CHECK(PlanCache(file).Find("key") == std::nullopt);
  }
}

TEST_CASE("the file lies in the user's cache") {
  {
    const ddp::testing::Variable cache("XDG_CACHE_HOME", "/cache");
    CHECK(FileInCache("plans") == "/cache/ddp/plans");
  }
  const ddp::testing::Variable cache("XDG_CACHE_HOME", "");
  {
    const ddp::testing::Variable home("HOME", "/home/me");
    CHECK(FileInCache("plans") == "/home/me/.cache/ddp/plans");
  }
  CHECK(FileInCache("plans").empty());
}

}  // namespace
}  // namespace nn
