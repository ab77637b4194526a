/* Ranks that find each other, and give up a call meanwhile or refuse it, and go on with the next one
 * (csrc/rendezvous/mesh.cpp).
 *
 * Checked: every rank comes to its end. So nobody waits for a peer that has given up his call, and
 * nobody loses a peer that lives.
 *
 *   RANKS, CALLS, QUITS   the size of what is searched; how often ranks give up or refuse
 *   NO_NOTE       a rank that gives up tells only those that it is connected with: must fail
 *   NO_MESSAGE    it only notes it in the store: must fail
 *   NO_LAST_LOOK  who has all boards does not look in the store again: must fail
 *   CLOSE         who gives up before it has met all closes its sockets and comes again: must fail
 */
#ifndef RANKS
#define RANKS 3
#endif
#ifndef CALLS
#define CALLS 2
#endif
#ifndef QUITS
#define QUITS 1
#endif

#define AT(to, from) [(to) * RANKS + (from)]
bool listens[RANKS];            /* its entry is in the store */
byte noted[RANKS];              /* the last call that it refused, in the store */
bool linked[RANKS * RANKS];     /* whether a rank holds its end of the connection */
bool board[RANKS * RANKS];      /* the sender's board is in the connection, or has been taken */
bool taken[RANKS * RANKS];
byte refused[RANKS * RANKS];    /* the last call of which the sender's refusal is there */
byte payload[RANKS * RANKS];    /* the calls whose payload is there, a bit for each */
byte quits;

/* What a rank that lacks boards has not acted on yet. */
#define NEWS(of) ((of) != me && ( \
	(!taken AT(me, of) && noted[of] >= call) || refused AT(me, of) >= call || \
	(!linked AT(me, of) && me > (of) && listens[of]) || \
	(!linked AT(me, of) && me < (of) && linked AT(of, me)) || \
	(linked AT(me, of) && board AT(me, of) && !taken AT(me, of))))

#define EACH_PEER peer = 0; do :: peer == RANKS -> break :: peer == me -> peer++ :: else ->
#define NEXT_PEER peer++ od

active [RANKS] proctype Rank() {
	byte me = _pid, peer, call;
	bool met, all;
next:
	if
	:: call == CALLS -> goto finished
	:: else -> call++
	fi;
	if
	:: true
	:: quits < QUITS -> quits++; goto give_up  /* refuses it, without a wait */
	fi;
	if
	:: met -> goto exchange
	:: else -> listens[me] = true
	fi;
mesh:
	if
	:: quits < QUITS -> quits++; goto give_up  /* a time-out, Ctrl-C, an exception: at any moment */
	:: true
	fi;
	all = true;
	EACH_PEER
		atomic {
			if
			:: !taken AT(me, peer) && noted[peer] >= call -> goto give_up
			:: refused AT(me, peer) >= call -> goto give_up
			:: else
			fi;
			/* The higher rank connects; the lower one has its end in its queue until it looks. */
			if
			:: !linked AT(me, peer) && me > peer && listens[peer] -> linked AT(me, peer) = true
			:: !linked AT(me, peer) && me < peer && linked AT(peer, me) -> linked AT(me, peer) = true
			:: else
			fi
		};
		atomic {
			if
			:: linked AT(me, peer) -> board AT(peer, me) = true
			:: else
			fi;
			if
			:: linked AT(me, peer) && board AT(me, peer) -> taken AT(me, peer) = true
			:: else -> all = false
			fi
		};
	NEXT_PEER;
	if
	:: !all ->
		/* Sleeps until there is something new. */
		peer = 0;
		goto asleep
	:: else
	fi;
#ifndef NO_LAST_LOOK
	EACH_PEER
		if
		:: noted[peer] >= call -> goto give_up
		:: else
		fi;
	NEXT_PEER;
#endif
	met = true;
exchange:
	EACH_PEER payload AT(peer, me) = payload AT(peer, me) | (1 << call); NEXT_PEER;
	EACH_PEER
		if
		:: (payload AT(me, peer) >> call) & 1 && refused AT(me, peer) < call
		:: refused AT(me, peer) >= call -> goto give_up
		:: quits < QUITS -> quits++; goto give_up
#ifdef CLOSE
		:: !linked AT(peer, me) -> assert(false)  /* takes it for its end */
#endif
		fi;
	NEXT_PEER;
	goto next;
asleep:
	/* One of the peers has something for this rank, or the rank is told that its call is refused. */
	if
	:: NEWS(0) || NEWS(1) || NEWS(RANKS - 1) -> goto mesh
	:: quits < QUITS -> quits++; goto give_up
	fi;
give_up:
#ifndef NO_NOTE
	noted[me] = call;
#endif
#ifndef NO_MESSAGE
	EACH_PEER
		if
		:: linked AT(me, peer) -> refused AT(peer, me) = call
		:: else
		fi;
	NEXT_PEER;
#endif
#ifdef CLOSE
	if
	:: !met ->
		EACH_PEER
			atomic {
				linked AT(me, peer) = false;
				board AT(peer, me) = false;
				board AT(me, peer) = false;
				taken AT(me, peer) = false
			};
		NEXT_PEER
	:: else
	fi;
#endif
	goto next;
finished:
	skip
}
