/* How a rank goes to sleep on a word of its memory, and is woken (csrc/channel/wait.h): the writer of the
 * word makes the system call only when somebody counts itself asleep.
 *
 * Checked: nobody sleeps for ever. (csrc/ looks around every 50 ms all the same, for the dead.)
 *
 *   RANKS   those that sleep on words of one owner, and count themselves in one place
 *   EARLY   the writer looks for sleepers before it writes: must fail
 *   LATE    a sleeper counts itself after it has looked at the word: must fail
 */
#ifndef RANKS
#define RANKS 2
#endif

byte words[RANKS];
byte sleepers;
bool asleep[RANKS];  /* in the kernel's queue of the word */

#define WAKE(word) d_step { asleep[word] = false }

active [RANKS] proctype Sleeper() {
	byte me = _pid, seen;
	do
	:: words[me] == 1 -> break
	:: words[me] == 0 ->
#ifdef LATE
		seen = words[me];
		/* The kernel compares the word with what was seen before it queues the caller. */
		atomic { asleep[me] = words[me] == seen }
		sleepers++;
#else
		sleepers++;
		seen = words[me];
		if
		:: seen == 1
		:: else -> atomic { asleep[me] = words[me] == seen }
		fi;
#endif
		!asleep[me];
		sleepers--
	od
}

active [RANKS] proctype Writer() {
	byte word = _pid - RANKS, counted;
#ifdef EARLY
	counted = sleepers;
	words[word] = 1;
#else
	words[word] = 1;
	counted = sleepers;
#endif
	if
	:: counted != 0 -> WAKE(word)
	:: else
	fi
}
