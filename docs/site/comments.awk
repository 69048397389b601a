# The comments of the public headers as Doxygen wants them: "//" before a name becomes "///", at the end of its line "///<", and what is
# indented by three spaces and no list is code. Lines keep their numbers. Deleted and defaulted functions need no comment.
function put(line) {
  if (NR > 1) print held
  held = line
}
function leave_code() {
  if (code) held = held " @endcode"
  code = 0
}
/^\/\/ (SPDX-|Copyright)/ { put(""); next }
# What only divides a header, or speaks to a linter, does not explain the name after it.
/^\/\/ (-----|NOLINT)/ { put(""); next }
/= delete;|operator==.*= default;/ { leave_code(); put(""); next }
# The first comment describes the file, not what follows it. Doxygen shows names outside of a namespace, as C has them, only of a file that
# has a comment.
!ended && /^\/\// { put(described++ ? "" : "/// @file"); next }
{ ended = 1 }
/^ *\/\/( |$)/ {
  if (/^ *\/\/   +- /) list = 1
  else if (!/^ *\/\/   /) list = 0
  blank = /^ *\/\/$/
  sub(/\/\//, "///")
  if (/^ *\/\/\/   / && !list) {
    if (!code) held = held " @code{.cpp}"
    code = 1
  } else {
    if (code && blank) sub(/\/\/\//, "/// @endcode")
    else leave_code()
    code = 0
    gsub(/#/, "\\#")
    gsub(/</, "\\<")
  }
  put($0)
  next
}
{ leave_code() }
# The same holds for a namespace.
/^namespace / { sub(/^/, "/** */ ") }
/[;{},] +\/\/ / && !/NOLINT|\/\/ namespace/ { sub(/ \/\/ /, " ///< ") }
{ put($0) }
END { print held }
