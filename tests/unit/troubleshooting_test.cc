// SPDX-License-Identifier: Apache-2.0
// docs/troubleshooting.md has an entry for each message of the library, its tools and its example trainers, and none
// for a message that does not exist. The messages are the string literals of the calls that make errors and warnings;
// in code that puts its findings together from pieces, they are all literals that are phrases.
#include <algorithm>
#include <cctype>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <regex>
#include <string>
#include <utility>
#include <vector>

#include "absl/algorithm/container.h"
#include "absl/strings/ascii.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/strings/str_replace.h"
#include "absl/strings/str_split.h"
#include "absl/strings/string_view.h"
#include "tests/support/catch.h"

namespace {

namespace fs = std::filesystem;

constexpr char kAnything[] = "…";

struct Message {
  std::string where, text;  // kAnything between its literals
};

std::string ReadAll(const fs::path& path) {
  std::ifstream file(path);
  REQUIRE(file.is_open());
  return {std::istreambuf_iterator<char>(file), std::istreambuf_iterator<char>()};
}

// Where the literal that begins at `at` ends.
size_t EndOfLiteral(const std::string& code, size_t at) {
  const char quote = code[at];
  size_t end = at + 1;
  while (end < code.size() && code[end] != quote) end += code[end] == '\\' ? 2 : 1;
  return std::min(end, code.size());
}

std::string WithoutComments(const std::string& code) {
  std::string result;
  for (size_t i = 0; i < code.size();) {
    // An apostrophe inside of a number begins no literal.
    const bool quote = code[i] == '"' || (code[i] == '\'' && (i == 0 || std::isdigit(code[i - 1]) == 0));
    if (quote) {
      const size_t end = EndOfLiteral(code, i) + 1;
      result.append(code, i, end - i);
      i = end;
    } else if (code.compare(i, 2, "//") == 0) {
      i = std::min(code.find('\n', i), code.size());
    } else {
      result += code[i++];
    }
  }
  return result;
}

// The literals from `at` up to the parenthesis that closes `depth` open ones.
std::vector<std::string> LiteralsOf(const std::string& code, size_t at, int depth) {
  std::vector<std::string> literals;
  bool adjacent = false;
  for (; depth > 0 && at < code.size(); ++at) {
    const char c = code[at];
    if (c == '\'' && (at == 0 || std::isdigit(code[at - 1]) == 0)) {
      at = EndOfLiteral(code, at);
      continue;
    }
    if (c == '"') {
      const size_t end = EndOfLiteral(code, at);
      const std::string literal = absl::StrReplaceAll(code.substr(at + 1, end - at - 1), {{"\\\"", "\""}});
      if (adjacent) {
        literals.back() += literal;
      } else {
        literals.push_back(literal);
      }
      adjacent = true;
      at = end;
      continue;
    }
    if (std::isspace(static_cast<unsigned char>(c)) == 0) adjacent = false;
    depth += c == '(' ? 1 : c == ')' ? -1 : 0;
  }
  return literals;
}

// Code whose findings reach the user without such a call: what the probes of backends find and auto says, and the
// doctor.
bool SaysFindings(absl::string_view path) {
  for (const char* part : {"libddp/comm/probe/", "libddp/comm/auto_group", "libddp/comm/context_regroup",
                           "libddp/comm/nccl/advice", "tools/doctor/"}) {
    if (absl::StrContains(path, part)) return true;
  }
  return false;
}

// Three words or more; anything shorter may be a name.
bool IsPhrase(absl::string_view literal) {
  const std::vector<absl::string_view> words = absl::StrSplit(literal, ' ', absl::SkipEmpty());
  return std::count_if(words.begin(), words.end(), [](absl::string_view word) {
           return absl::ascii_isalpha(static_cast<unsigned char>(word[0])) && word.find_first_of("/_=") == word.npos;
         }) >= 3;
}

// Phrases that are no message, nor part of one.
constexpr absl::string_view kNoMessages[] = {"ddp probe cache 1", "of unknown version", "an operation on the GPU"};

// The literals of each statement, as one message.
std::vector<Message> FindingsOf(const std::string& source, const std::string& name) {
  std::string code;
  for (const absl::string_view line : absl::StrSplit(WithoutComments(source), '\n')) {
    if (!absl::StartsWith(absl::StripLeadingAsciiWhitespace(line), "#")) absl::StrAppend(&code, line, "\n");
  }
  constexpr int kWhole = 1000;
  std::vector<Message> messages;
  for (size_t begin = 0; begin < code.size();) {
    size_t end = begin;
    while (end < code.size() && !absl::StrContains(";{}", code.substr(end, 1))) {
      end = code[end] == '"' || code[end] == '\'' ? EndOfLiteral(code, end) + 1 : end + 1;
    }
    const std::vector<std::string> literals = LiteralsOf(code.substr(begin, end - begin), 0, kWhole);
    const std::string text = absl::StrJoin(literals, kAnything);
    const bool help = absl::StartsWith(text, "Usage: ") || absl::c_linear_search(kNoMessages, text);
    if (!help && absl::c_any_of(literals, IsPhrase)) messages.push_back({name, text});
    begin = end + 1;
  }
  return messages;
}

// A literal that only says who speaks, or where another text goes, is no message.
bool SaysSomething(absl::string_view literal) {
  return absl::StrReplaceAll(literal, {{"rank ", ""}, {": ", ""}}).size() >= 8;
}

std::vector<Message> MessagesOf(const std::string& source, const std::string& name) {
  static const std::regex kCall(
      R"(\b(absl::(?!Is)[A-Z][A-Za-z]*Error|Log(Warn|Error|At)|[Ee]rror|refuse|Invalid|FileError|fprintf)\()");
  if (SaysFindings(name)) return FindingsOf(source, name);
  const std::string code = WithoutComments(source);
  std::vector<Message> messages;
  for (std::sregex_iterator call(code.begin(), code.end(), kCall), end; call != end; ++call) {
    const std::vector<std::string> literals =
        LiteralsOf(code, static_cast<size_t>(call->position() + call->length()), 1);
    if (std::none_of(literals.begin(), literals.end(), (*call)[1] == "fprintf" ? IsPhrase : SaysSomething)) continue;
    messages.push_back({name, ""});
    for (const std::string& literal : literals)
      messages.back().text += (&literal == &literals[0] ? "" : kAnything) + literal;
  }
  return messages;
}

template <typename Function>
void ForEachSource(Function f) {
  for (const char* folder : {"/libddp", "/include", "/tools", "/examples"}) {
    for (const auto& entry : fs::recursive_directory_iterator(std::string(DDP_SOURCE_DIR) + folder)) {
      const std::string extension = entry.path().extension().string();
      if (absl::StrContains(" .cc .h .cu .c ", absl::StrCat(" ", extension, " "))) f(entry.path());
    }
  }
}

// The phrases in quotation marks of a part of the page: of the tables' first columns, and of its last section.
std::vector<std::string> PhrasesOf(const std::string& page) {
  std::vector<std::string> phrases;
  bool last = false;
  for (const std::string& line : std::vector<std::string>(absl::StrSplit(page, '\n'))) {
    last = last || line == "## Errors of libddp itself";
    if (!last && !absl::StartsWith(line, "| \"")) continue;
    const std::string column = last ? line : line.substr(0, line.find(" | "));
    const std::vector<std::string> parts = absl::StrSplit(column, '"');
    for (size_t i = 1; i + 1 < parts.size(); i += 2) phrases.push_back(parts[i]);
  }
  return phrases;
}

bool Fits(const std::string& phrase, const std::string& text) {
  size_t at = 0;
  for (const std::string& part : std::vector<std::string>(absl::StrSplit(phrase, kAnything))) {
    at = text.find(part, at);
    if (at == std::string::npos) return false;
    at += part.size();
  }
  return true;
}

// Those without an entry.
std::vector<Message> Lacking(const std::vector<Message>& messages, const std::vector<std::string>& phrases) {
  std::vector<Message> lacking;
  absl::c_copy_if(messages, std::back_inserter(lacking), [&](const Message& message) {
    return absl::c_none_of(phrases, [&](const std::string& phrase) { return Fits(phrase, message.text); });
  });
  return lacking;
}

TEST_CASE("each message has an entry, and each entry a message") {
  const std::string page = ReadAll(DDP_SOURCE_DIR "/docs/troubleshooting.md");
  const size_t others = page.find("## What others say");
  REQUIRE(others != std::string::npos);
  const std::vector<std::string> phrases = PhrasesOf(page.substr(0, others)), words = PhrasesOf(page.substr(others));
  CHECK(phrases.size() > 100);
  std::vector<Message> messages;
  std::string everything;
  ForEachSource([&](const fs::path& path) {
    const std::string source = ReadAll(path);
    everything += WithoutComments(source);
    for (const Message& message : MessagesOf(source, path.string())) messages.push_back(message);
  });
  CHECK(messages.size() > 200);
  std::vector<std::string> all = phrases;
  all.insert(all.end(), words.begin(), words.end());
  for (const Message& message : Lacking(messages, all)) FAIL_CHECK(message.where << ": " << message.text);
  for (const std::string& phrase : phrases) {
    INFO(phrase);
    const bool exists =
        std::any_of(messages.begin(), messages.end(), [&](const Message& m) { return Fits(phrase, m.text); });
    CHECK((exists || Fits(phrase, everything)));
  }
  // What is recognised in NCCL's own words.
  const std::string advice = ReadAll(DDP_SOURCE_DIR "/libddp/comm/nccl/advice.cc");
  static const std::regex kSays(R"re(says\("([^"]+)"\))re");
  int recognised = 0;
  for (std::sregex_iterator said(advice.begin(), advice.end(), kSays), end; said != end; ++said, ++recognised) {
    INFO((*said)[1].str());
    CHECK(std::count(words.begin(), words.end(), (*said)[1].str()) == 1);
  }
  CHECK(recognised > 5);
}

TEST_CASE("a new message without an entry is found, wherever it is") {
  const std::vector<std::string> phrases = PhrasesOf(ReadAll(DDP_SOURCE_DIR "/docs/troubleshooting.md"));
  const std::pair<const char*, const char*> planted[] = {
      {"libddp/comm/auto_group.cc", R"(void F() { reason_ = "the moon is full"; })"},
      {"libddp/comm/probe/verdict.cc", R"(return absl::StrCat("fell asleep (it got ", time, " of sleep");)"},
      {"libddp/comm/probe/verdict.cc", R"(known->cause = absl::StrCat("the GPUs are on strike", known->cause);)"},
      {"libddp/comm/nccl/advice.cc", R"(if (x) return {"the GPUs are on strike", "wait for them"};)"},
      {"libddp/comm/context.cc", R"(LogWarn("rank ", rank, ": the moon is full");)"},
      {"tools/doctor/checks.cc", R"(Say(Severity::kNote, "moon", "", "the moon is full on GPU ", gpu);)"},
      {"tools/ddp_probe.cc", R"(std::fprintf(stderr, "ddp_probe: the moon is full\n");)"},
      {"examples/train/flags.cc", R"(return absl::InvalidArgumentError("--moon is full");)"},
  };
  for (const auto& [path, code] : planted) {
    CAPTURE(path, code);
    const std::string source = ReadAll(absl::StrCat(DDP_SOURCE_DIR, "/", path));
    CHECK(Lacking(MessagesOf(absl::StrCat(source, code), path), phrases).size() ==
          Lacking(MessagesOf(source, path), phrases).size() + 1);
  }
}

TEST_CASE("messages are found in code") {
  const auto text_of = [](const std::string& code) {
    const std::vector<Message> found = MessagesOf(code, "");
    return found.size() == 1 ? found[0].text : absl::StrCat(found.size(), " messages");
  };
  CHECK(text_of(R"(return absl::InternalError("it is broken");)") == "it is broken");
  CHECK(text_of(R"(return absl::InternalError(absl::StrCat("it is \"", f(1), "\" of" " all"));)") ==
        "it is \"…\" of all");
  CHECK(text_of(R"(LogWarn("rank ", rank, ": it is broken");)") == "rank …: it is broken");
  CHECK(text_of(R"(return error("index ", i, " of ", n, " parameters");)") == "index … of … parameters");
  CHECK(text_of(R"(// return absl::InternalError("it is broken");)") == "0 messages");
  CHECK(text_of(R"(if (absl::IsInternalError("it is broken")))") == "0 messages");
  CHECK(text_of(R"(return absl::InternalError(absl::StrCat("rank ", rank, ": ", why));)") == "0 messages");
  CHECK(Fits("a … c", "x a b… c"));
  CHECK_FALSE(Fits("a … c", "c a "));
}

}  // namespace
