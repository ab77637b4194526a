/* Ranks of which some miss calls that the others make: which call of one rank is the same as which
 * call of another (csrc/channel/channel.cpp, Channel::agree_on_call).
 *
 * A program makes the calls 1, 2, ..., LAST. A rank may miss some without knowing it (an error in
 * the caller's own code, or in what runs before the op does), so the number of a call (`number`)
 * says less than what it is (`program`). A call works on all ranks or on none.
 *
 * Checked: ranks whose calls have the same number either make the same call, or all fail it; nobody
 * waits for ever, but for ranks that have ended; and once nobody misses calls any more, no more
 * calls fail than were missed, and one.
 *
 *   RANKS, LAST, MISSED   the size of what is searched; how many calls are missed, at most
 *   NO_STANDING   ranks do not say what they call next: must fail, since they stay apart
 *   ALL_WAIT      who is behind does not fail, but waits as the others do: must fail
 *   MISTAKES      with MISSED=0: how many calls may be others by mistake, such as the last one again.
 *                 Nobody may take another number then, and calls without a mistake must work.
 *   ONE_IS_ENOUGH who calls what a peer has failed is behind: must fail with two mistakes
 */
#ifndef RANKS
#define RANKS 2
#endif
#ifndef LAST
#define LAST 7
#endif
#ifndef MISSED
#define MISSED 2
#endif
#define NUMBERS (LAST * 2 + 2)

/* By number and rank: what the rank calls under the number. 0: nothing yet. */
byte entered[NUMBERS * RANKS];
bool failed[NUMBERS * RANKS];       /* the rank has failed the call, or passed over the number */
byte stands[NUMBERS * RANKS];       /* what it said it would call, after a failure */
short fails[NUMBERS * RANKS];       /* and which calls it has failed directly before, as bits */
byte before[NUMBERS * RANKS];       /* the last of them */
bool ended[RANKS];
byte missed;
byte last_missed;                   /* the last call of the program that a rank has missed */
byte mistaken, last_mistaken;       /* likewise */

#define AT(n, of) [(n) * RANKS + (of)]
#define EACH_PEER peer = 0; do :: peer == RANKS -> break :: peer == me -> peer++ :: else ->
#define NEXT_PEER peer++ od
/* Who fails a call a second time is behind: a peer has failed it and the one before in a row, and
 * calls something else. */
#define AHEAD(of, other) (stands AT(number, other) != stands AT(number, of) && \
	((fails AT(number, other) >> stands AT(number, of)) & 1) && ONE_BEFORE(of, other))
#ifdef ONE_IS_ENOUGH
#define ONE_BEFORE(of, other) true
#else
#define ONE_BEFORE(of, other) (before AT(number, of) != 0 && \
	((fails AT(number, other) >> before AT(number, of)) & \
	 ((1 << (stands AT(number, of) - before AT(number, of))) - 1)) == 1)
#endif

active [RANKS] proctype Rank() {
	byte me = _pid, peer, program, call, number, last, behind;
	short row;
	bool after_failure, mine_behind, known;
next:
	atomic {
		if
		:: program == LAST -> goto finished
		:: else -> program++
		fi;
		if
		:: missed < MISSED -> missed++; last_missed = program; goto next
		:: true
		fi;
		call = program;
#ifdef MISTAKES
		if
		:: mistaken < MISTAKES ->
			mistaken++;
			if :: program > last_mistaken -> last_mistaken = program :: else fi;
			if
			:: call = program + LAST * (me + 1)
			:: program > 1 -> call = program - 1
			fi
		:: true
		fi;
#endif
		number++
	}
agree:
#ifndef NO_STANDING
	if
	:: after_failure ->
		atomic {
			stands AT(number, me) = call;
			fails AT(number, me) = row;
			before AT(number, me) = last
		};
		known = true;
		EACH_PEER
			if
			:: stands AT(number, peer) != 0
			:: stands AT(number, peer) == 0 && entered AT(number, peer) != 0 -> known = false
			:: ended[peer] -> goto fail
			fi;
		NEXT_PEER;
		if
		:: known ->
			atomic {
				behind = 0;
				mine_behind = false;
				peer = 0;
				do
				:: peer == RANKS -> break
				:: else ->
					if
					:: AHEAD(peer, 0) || AHEAD(peer, 1) || AHEAD(peer, RANKS - 1) ->
						behind++;
						if :: peer == me -> mine_behind = true :: else fi
					:: else
					fi;
					peer++
				od
			};
			if
			:: behind == 0 || behind == RANKS
			:: else ->
				if
#ifndef ALL_WAIT
				:: mine_behind -> goto fail
#endif
				:: else -> atomic {
					failed AT(number, me) = true;
					entered AT(number, me) = call;
					number++
				}; goto agree
				fi
			fi
		:: else
		fi
	:: else
	fi;
#endif
	entered AT(number, me) = call;
	/* The call itself: data of all ranks, or the failure of one. A rank that waits for one that has
	 * ended comes to its time-out. */
	EACH_PEER
		if
		:: entered AT(number, peer) != 0 ->
			if
			:: failed AT(number, peer) || entered AT(number, peer) != call -> goto fail
			:: else
			fi
		:: ended[peer] && entered AT(number, peer) == 0 -> goto fail
		fi;
	NEXT_PEER;
	after_failure = false;
	row = 0;
	last = 0;
	goto next;
fail:
	atomic {
		failed AT(number, me) = true;
		entered AT(number, me) = call;
		after_failure = true;
		row = row | (1 << call);
		last = call
	};
#ifdef MISTAKES
	assert(number == program && program <= last_mistaken);
#else
	assert(program <= last_missed + MISSED + 1);
#endif
	goto next;
finished:
	ended[me] = true
}
