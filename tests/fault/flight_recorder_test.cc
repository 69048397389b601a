// SPDX-License-Identifier: Apache-2.0
// What the survivors' flight recorder says of a rank that cannot say anything itself.
#include <unistd.h>

#include <filesystem>
#include <fstream>
#include <iterator>
#include <nlohmann/json.hpp>
#include <regex>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/time/time.h"
#include "tests/fault/job.h"
#include "tests/support/catch.h"

namespace ddp::testing {
namespace {

// Runs three ranks, of which `victim` comes to its end in the middle, and returns what the flight recorder wrote.
nlohmann::json RunAndRead(const std::string& how, int victim, const std::string& buffers, int count) {
  const std::string path =
      (std::filesystem::temp_directory_path() / absl::StrCat("ddp-flight-", getpid(), ".json")).string();
  std::filesystem::remove(path);
  Job job;
  for (int rank = 0; rank < 3; ++rank) {
    job.Start(rank, 3,
              {"--how=" + how, "--when=before", "--buffers=" + buffers, absl::StrCat("--count=", count),
               absl::StrCat("--victim=", victim), how == "stop" ? "--timeout=4" : "--timeout=0"},
              {"DDP_TIMEOUT=50", "DDP_FLIGHT_RECORDER=" + path, "DDP_LOG_LEVEL=off"});
  }
  job.Finish(absl::Seconds(60), victim);
  std::ifstream file(path);
  const std::string text((std::istreambuf_iterator<char>(file)), std::istreambuf_iterator<char>());
  std::filesystem::remove(path);
  return nlohmann::json::parse(text, nullptr, /*allow_exceptions=*/false);
}

TEST_CASE("the flight recorder tells of a rank that is stopped or dead", "[timeout]") {
  for (const char* how : {"stop", "kill"}) {
    for (const int victim : {0, 1}) {
      for (const auto& [buffers, count] : {std::pair("allocated", 1), std::pair("ordinary", 500'000)}) {
        INFO(how << " rank " << victim << " " << buffers << " count " << count);
        const nlohmann::json json = RunAndRead(how, victim, buffers, count);
        REQUIRE(json.is_object());
        INFO(json.dump(2));
        CHECK(json["incident"] == "failure");
        REQUIRE(json["ranks"].size() == 3);
        const int teller = json["told_by"];
        // A death is noticed at once, when a survivor may still be on its way out of the operation before.
        const bool died = std::string(how) == "kill";
        CHECK(teller != victim);
        // All ranks went through the same operations, until the victim did not call the next one.
        const nlohmann::json& last = json["ranks"][static_cast<size_t>(teller)]["operations"].back();
        CHECK(json["parting"] == last["sequence"]);
        CHECK(last["state"] == "announced");
        CHECK(absl::StrContains(last["call"].get<std::string>(), absl::StrCat("all_reduce(sum, float32, ", count)));
        for (int rank = 0; rank < 3; ++rank) {
          const nlohmann::json& one = json["ranks"][static_cast<size_t>(rank)];
          const auto doing = one["doing"].get<std::string>();
          INFO(doing);
          CHECK(one["dead"] == (rank == victim && died));
          if (died && rank != victim && rank != teller) continue;
          // Another survivor may be a little late as well: "waits for ranks 0, 1".
          const std::string waits = absl::StrCat("waits for ranks? ([0-9]+, )*", victim, "\\b");
          CHECK(std::regex_search(doing, std::regex(rank == victim ? "no operation called since operation" : waits)));
        }
      }
    }
  }
}

}  // namespace
}  // namespace ddp::testing
