// docs/troubleshooting.md has an entry for each message of the library, and none for a message that does not exist. The
// messages are the string literals of the calls that make errors and warnings.
#include <algorithm>
#include <cctype>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <regex>
#include <string>
#include <vector>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_replace.h"
#include "absl/strings/str_split.h"
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

// The literals up to the parenthesis that closes the one before `at`.
std::vector<std::string> LiteralsOfCall(const std::string& code, size_t at) {
  std::vector<std::string> literals;
  bool adjacent = false;
  for (int depth = 1; depth > 0 && at < code.size(); ++at) {
    const char c = code[at];
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

// A literal that only says who speaks, or where another text goes, is no message.
bool SaysSomething(const std::string& literal) {
  return absl::StrReplaceAll(literal, {{"rank ", ""}, {"{}", ""}, {": ", ""}}).size() >= 8;
}

std::vector<Message> MessagesOf(const std::string& source, const std::string& name) {
  static const std::regex kCall(
      R"(\b(absl::(?!Is)[A-Z][A-Za-z]*Error|Log\(\)\.(warn|error|critical)|[Ee]rror|refuse|Invalid|FileError)\()");
  const std::string code = WithoutComments(source);
  std::vector<Message> messages;
  for (std::sregex_iterator call(code.begin(), code.end(), kCall), end; call != end; ++call) {
    const std::vector<std::string> literals =
        LiteralsOfCall(code, static_cast<size_t>(call->position() + call->length()));
    if (std::none_of(literals.begin(), literals.end(), SaysSomething)) continue;
    messages.push_back({name, ""});
    for (const std::string& literal : literals)
      messages.back().text += (&literal == &literals[0] ? "" : kAnything) + literal;
  }
  return messages;
}

template <typename Function>
void ForEachSource(Function f) {
  for (const char* folder : {"/libddp", "/include"}) {
    for (const auto& entry : fs::recursive_directory_iterator(std::string(DDP_SOURCE_DIR) + folder)) {
      const std::string extension = entry.path().extension().string();
      if (extension == ".cc" || extension == ".h" || extension == ".cu") f(entry.path());
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
    for (const Message& message : MessagesOf(source, path.filename().string())) messages.push_back(message);
  });
  CHECK(messages.size() > 200);
  for (const Message& message : messages) {
    INFO(message.where << ": " << message.text);
    CHECK(std::any_of(phrases.begin(), phrases.end(), [&](const auto& phrase) { return Fits(phrase, message.text); }));
  }
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

TEST_CASE("messages are found in code") {
  const auto text_of = [](const std::string& code) {
    const std::vector<Message> found = MessagesOf(code, "");
    return found.size() == 1 ? found[0].text : absl::StrCat(found.size(), " messages");
  };
  CHECK(text_of(R"(return absl::InternalError("it is broken");)") == "it is broken");
  CHECK(text_of(R"(return absl::InternalError(absl::StrCat("it is \"", f(1), "\" of" " all"));)") ==
        "it is \"…\" of all");
  CHECK(text_of(R"(Log().warn("rank {}: it is broken", rank);)") == "rank {}: it is broken");
  CHECK(text_of(R"(return error("index ", i, " of ", n, " parameters");)") == "index … of … parameters");
  CHECK(text_of(R"(// return absl::InternalError("it is broken");)") == "0 messages");
  CHECK(text_of(R"(if (absl::IsInternalError("it is broken")))") == "0 messages");
  CHECK(text_of(R"(return absl::InternalError(absl::StrCat("rank ", rank, ": ", why));)") == "0 messages");
  CHECK(Fits("a … c", "x a b… c"));
  CHECK_FALSE(Fits("a … c", "c a "));
}

}  // namespace
