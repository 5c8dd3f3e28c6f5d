#!/usr/bin/env bash
# Checks that Spark will find Java 17 or later; says how to get it otherwise.
set -euo pipefail

MINIMUM=17
java="${JAVA_HOME:+$JAVA_HOME/bin/}java"

how_to_install() {
    cat >&2 <<MESSAGE
$1
Spark 4.3 needs Java $MINIMUM or later.
  Debian, Ubuntu:  sudo apt-get install --yes openjdk-17-jre-headless
  macOS:           brew install openjdk@17 && export JAVA_HOME="\$(brew --prefix openjdk@17)"
MESSAGE
    exit 1
}

# macOS has a /usr/bin/java that only says that there is none.
text="$("$java" -version 2>&1)" || how_to_install "No Java found (looked for '$java')."
version="$(sed -n 's/.*version "\([^"]*\)".*/\1/p' <<<"$text" | head -n 1)"
major="${version#1.}"
major="${major%%[!0-9]*}"
if [[ -z "$major" ]]; then
    how_to_install "'$java -version' says nothing that looks like a version: $text"
fi
if ((major < MINIMUM)); then
    how_to_install "'$java' is version $version."
fi
